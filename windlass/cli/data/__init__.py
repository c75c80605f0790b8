"""`windlass data`: datasets to JSON lines, text to token shards, and a look at what is in them."""

from __future__ import annotations

import click

from windlass.cli.data.fetch import fetch
from windlass.cli.data.inspect import inspect
from windlass.cli.data.tokenize import tokenize


@click.group()
def data() -> None:
    """Data: fetch, tokenize to shards, inspect."""


data.add_command(fetch)
data.add_command(tokenize)
data.add_command(inspect)
