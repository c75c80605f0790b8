"""Bring what a run takes from a hub onto every node once; ranks then read files and ask no hub."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from windlass.common.hub import fetch, fetched, import_hub, is_hub_id
from windlass.data.sources.source import only_shards
from windlass.data.tokenizers.tokenizer import TOKENIZER_FILES
from windlass.errors import UserError
from windlass.spec import Run
from windlass.trainer.distributed.agreement import on_every_rank
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.safetensors_files import weight_files
from windlass.trainer.model.structure import weights_path

log = logging.getLogger(__name__)
CONFIGURATION = ("config.json", "generation_config.json")
SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
REMOTE_CODE = ("*.py",)


@dataclass(frozen=True)
class Located:
    """Where on this machine the things are that a run names."""

    model: Path | None  # its configuration; None: the catalogue has it
    weights: Path | None  # None: the run draws its own
    tokenizer: str


def locate(run: Run, ranks: Ranks | None = None) -> Located:
    """Every rank calls this together; one rank per node downloads, or one of all where nodes share the cache.

    Without `ranks` this process is alone.
    """

    def get(hub_id: str, files: tuple[str, ...], revision: str | None) -> Path:
        return once_per_node(hub_id, files, ranks, revision) if ranks else complete(hub_id, files, revision)

    assert run.data.tokenizer  # resolved
    model, tokenizer = run.model, run.data.tokenizer
    pretrained = model.init == "pretrained"
    code = REMOTE_CODE if model.trust_remote_code else ()
    folder: Path | None = None
    weights: Path | None = None
    if model.path:
        files = (*CONFIGURATION, *code, *(SAFETENSORS if pretrained else ()))
        folder = get(model.path, files, model.revision) if is_hub_id(model.path) else Path(model.path).expanduser()
    if pretrained:
        weights = folder or get(weights_path(model), SAFETENSORS, model.revision)
    if is_hub_id(tokenizer) and not only_shards(run.data):
        tokenizer = str(get(tokenizer, TOKENIZER_FILES, model.revision if tokenizer == model.path else None))
    return Located(folder, weights, tokenizer)


def complete(hub_id: str, files: tuple[str, ...], revision: str | None) -> Path:
    """Fetch files; weights in the old format only where there are no others."""
    folder = fetch(hub_id, files, what="model", revision=revision)
    if set(SAFETENSORS) <= set(files) and weight_files(folder) is None:
        folder = fetch(hub_id, (*files, *OLD_WEIGHTS), what="model", revision=revision)
    return folder


def once_per_node(hub_id: str, files: tuple[str, ...], ranks: Ranks, revision: str | None) -> Path:
    shared = cache_is_shared(ranks)
    downloads = ranks.is_first or (ranks.local_rank == 0 and not shared)
    on_every_rank(ranks, lambda: complete(hub_id, files, revision) if downloads else None)
    folder = fetched(hub_id, files, revision=revision)
    if folder is None:
        raise UserError(f"{hub_id} was downloaded, but rank {ranks.rank} does not find it")
    return folder


def cache_is_shared(ranks: Ranks) -> bool:
    """Whether all nodes see the same cache of the hub's files: rank 0 leaves a mark there, and the others look."""
    hub = import_hub("the model")
    root = Path(hub.constants.HF_HUB_CACHE)
    name = ranks.broadcast(f".windlass-{secrets.token_hex(8)}", patient=True)
    if ranks.is_first:
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        except OSError as error:
            log.warning("%s cannot be written to: %s", root, error)
    ranks.gather(None, patient=True)  # the mark is there
    seen = all(ranks.gather((root / name).exists(), patient=True))
    if ranks.is_first:
        (root / name).unlink(missing_ok=True)
    return seen
