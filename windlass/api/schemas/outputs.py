"""Which command prints which model, and the JSON Schema of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from windlass.api.schemas import SCHEMA_VERSION, Error, clusters, data, images, runs


@dataclass(frozen=True)
class Output:
    """What a command prints; with some options it prints something else."""

    command: str
    typed: str
    """Options and arguments with which it prints this."""
    model: Any
    note: str = ""
    each_line: bool = False
    stream: Literal["stdout", "stderr"] = "stdout"

    @property
    def name(self) -> str:
        return f"{self.command} {self.typed}".strip()

    @property
    def options(self) -> frozenset[str]:
        return frozenset(word for word in self.typed.split() if word.startswith("--"))


LINES = "one object per line"

OUTPUTS = (
    Output("init", "", runs.InitResult),
    Output("init", "--list", list[runs.Preset]),
    Output("plan", "", runs.Plan),
    Output("run", "", runs.RunResult),
    Output("run", "--dry-run", runs.DryRun),
    Output("run", "--sweep", list[runs.SweepRun]),
    Output("run", "--sweep --dry-run", runs.SweepDryRun),
    Output(
        "run",
        "(progress)",
        runs.ProgressLine,
        note=f"on stderr, {LINES}; lines that are no objects are for people",
        each_line=True,
        stream="stderr",
    ),
    Output("ls", "", list[runs.ListedRun]),
    Output("show", "", runs.ShownRun),
    Output("logs", "", list[runs.LogLine]),
    Output("logs", "--follow", runs.LogLine, note=LINES, each_line=True),
    Output("stop", "", runs.StopResult),
    Output("why", "", runs.WhyResult),
    Output("notify", "", runs.NotifyResult),
    Output("compare", "", runs.Comparison),
    Output("sweep", "", list[runs.SweepResult], note="with --dry-run before any of them starts"),
    Output("plot", "", runs.WrittenFile),
    Output("report", "", runs.WrittenFile),
    Output("ui", "", runs.PageAddress),
    Output("rm", "", list[runs.RemovedRun]),
    Output("cluster ls", "", clusters.ListedClusters),
    Output("cluster use", "", clusters.UsedCluster),
    Output("cluster check", "", clusters.CheckedCluster),
    Output("cluster fix", "", clusters.FixedCluster),
    Output("cluster create", "", clusters.CreatedCluster),
    Output("cluster delete", "", clusters.DeletedCluster),
    Output("top", "", runs.Use),
    Output("top", "--every", runs.Use, note=LINES, each_line=True),
    Output("debug", "", list[runs.NetworkCheck]),
    Output("sync", "", runs.SyncResult),
    Output("generate", "", runs.Generated),
    Output("eval", "", runs.Evaluation),
    Output("ckpt ls", "", list[data.ListedCheckpoint]),
    Output("ckpt verify", "", list[data.VerifiedCheckpoint]),
    Output("ckpt get", "", data.FetchedCheckpoint),
    Output("ckpt prune", "", data.Pruned),
    Output("ckpt export", "", data.Exported),
    Output("ckpt export", "--push", data.PushedExport),
    Output("ckpt export", "--push --dry-run", data.PushRequest),
    Output("data fetch", "", data.FetchedData),
    Output("data tokenize", "", data.TokenizedData),
    Output("data inspect", "", data.InspectedData),
    Output("data inspect", "RUN.yaml", list[data.UsedSource]),
    Output("data inspect", "RUN.yaml --sequence", data.Sequence),
    Output("image plan", "", images.ImagePlan),
    Output("image plan", "with a Dockerfile", images.CheckedImage, note="of the run file, or --dockerfile"),
    Output("image build", "", images.BuiltImage),
    Output("image build", "--dry-run", images.BuildRequest),
    Output("image test", "", images.ImageReport),
    Output("image push", "", images.PushedImage),
    Output("image push", "--dry-run", images.PushRequest),
    Output("image infrastructure", "", dict[str, Any], note="a CloudFormation template: its form is not ours"),
    Output("agent install", "", runs.InstalledSkills),
    Output("doctor", "", runs.Examination),
    Output("schema", "", dict[str, Any], note="a JSON Schema"),
    Output("schema", "--keys", list[runs.SchemaKey]),
    Output("error", "", Error, note="of every command that fails"),
)


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Loss" for `loss` says nothing


def schema_of(outputs: Iterable[Output]) -> dict[str, Any]:
    """The JSON Schema of some outputs, each under its name in `$defs`, and of any of them as a whole.

    Unknown keys are allowed: a newer windlass may print more.
    """
    adapters: list[tuple[str, Literal["serialization"], TypeAdapter[Any]]] = [
        (output.name, "serialization", TypeAdapter(output.model)) for output in outputs
    ]
    by_name, models = TypeAdapter.json_schemas(adapters, schema_generator=_Generator)
    each = {name: by_name[name, "serialization"] for name, _, _ in adapters}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What windlass prints with --json",
        "schema_version": SCHEMA_VERSION,
        "anyOf": [{"$ref": f"#/$defs/{quote(name)}"} for name in each],
        "$defs": {**each, **models.get("$defs", {})},
    }
    opened: dict[str, Any] = _without_closed_objects(schema)
    return opened


def _without_closed_objects(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "additionalProperties" or value is not False}
        return {key: _without_closed_objects(value) for key, value in kept.items()}
    return [_without_closed_objects(item) for item in schema] if isinstance(schema, list) else schema
