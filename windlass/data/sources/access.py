"""Whether the hub would give a run what it names, asked from here before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.catalog.models import preset
from windlass.common.hub import check_access, is_hub_id
from windlass.data.sources.source import FILE_BUILDERS, HUB_PREFIX, ShardSource, parse_source
from windlass.errors import ExitCode, UserError
from windlass.spec import Run


@dataclass(frozen=True)
class Repository:
    name: str
    what: str
    kind: str  # "model" or "dataset"
    revision: str | None = None


def repositories(run: Run) -> Iterator[Repository]:
    """What a resolved run takes from a hub."""
    model, data = run.model, run.data
    if model.path and is_hub_id(model.path):
        yield Repository(model.path, "model", "model", model.revision)
    elif model.preset and model.init == "pretrained":
        hub_id = preset(model.preset).hub_id
        if hub_id:
            yield Repository(hub_id, "model", "model", model.revision)
    if model.lora and model.lora.adapter and is_hub_id(model.lora.adapter):
        yield Repository(model.lora.adapter, "adapter", "model")
    texts = [text for text in (data.source, data.validation_source) if text and text.startswith(HUB_PREFIX)]
    for text in texts:
        name = text.removeprefix(HUB_PREFIX)
        if name not in FILE_BUILDERS:
            yield Repository(name, "dataset", "dataset")
    if data.tokenizer and is_hub_id(data.tokenizer) and not _has_shards(run):
        yield Repository(data.tokenizer, "tokenizer", "model")


def _has_shards(run: Run) -> bool:
    """Shards bring their tokenizer with them."""
    return isinstance(parse_source(run.data, "train"), ShardSource)


def check_hub(run: Run) -> list[str]:
    """Raise a UserError for what the hub refuses; warnings for what could not be asked from here.

    A machine that submits may be shut off from the hub while those that train are not.
    """
    warnings: list[str] = []
    checked: set[tuple[str, str]] = set()
    for repository in repositories(run):
        if (repository.name, repository.kind) in checked:
            continue
        checked.add((repository.name, repository.kind))
        try:
            check_access(repository.name, what=repository.what, revision=repository.revision, kind=repository.kind)
        except UserError as error:
            if error.exit_code != ExitCode.FAILED:
                raise
            warnings.append(f"{error.what}: {error.evidence}; not known whether the ranks can fetch it")
            break  # the others are on the same hub
    return warnings
