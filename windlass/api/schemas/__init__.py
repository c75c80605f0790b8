"""What every command prints with `--json`. The schemas of docs/output.schema.json are made from these models.

Tests validate whatever a command prints against its model, so a key that is added to a command is added here. Keys may
be added at any time. A key that goes, another type, or a new word in a list of words raises SCHEMA_VERSION.
"""

from windlass.api.schemas.model import SCHEMA_VERSION
from windlass.api.schemas.outputs import OUTPUTS, Output, schema_of

__all__ = ["OUTPUTS", "SCHEMA_VERSION", "Output", "schema_of"]
