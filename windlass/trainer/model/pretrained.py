"""Load a model's own weights from its files: every rank reads the rows it holds, so that no rank holds the whole."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.common.files import json_digest, sha256_of
from windlass.errors import UserError
from windlass.trainer.distributed.agreement import on_every_rank
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.lora import QuantizedLoraLinear
from windlass.trainer.model.new_tokens import ROWS, rows_modules
from windlass.trainer.model.safetensors_files import (
    StoredTensor,
    fill,
    fill_from,
    mean_row,
    read_header,
    weight_files,
)

log = logging.getLogger(__name__)
ADDED = (".lora_a", ".lora_b", f".{ROWS}")  # parameters that no model's files hold


@dataclass(frozen=True)
class Source:
    """The stored tensors that one parameter is made of."""

    parts: tuple[StoredTensor, ...]
    convert: Callable[[], Tensor] | None  # None: the one part is the parameter

    def whole(self) -> Tensor:
        return self.convert() if self.convert else self.parts[0].whole()

    def read_into(self, target: Tensor) -> None:
        """This rank's part. Rows that the files lack become the mean of those they have."""
        if self.convert is None:
            fill_from(target, self.parts[0])
        else:
            fill(target, self.convert())


@dataclass(frozen=True)
class Weights:
    """A model's weights in their files, found and understood but not read."""

    folder: Path
    files: tuple[Path, ...]
    sources: dict[str, Source] | None  # by parameter; None: only transformers itself can read this layout
    trusted: bool  # to run code of its own

    def digest(self, ranks: Ranks) -> str:
        """One SHA-256 of all files; every rank reads its share of them."""
        parts = ranks.gather(self.hashes(ranks.rank, ranks.world_size), patient=True)
        return one_digest({name: value for part in parts for name, value in part.items()})

    def hashes(self, index: int = 0, count: int = 1) -> dict[str, str]:
        """SHA-256 of every count-th file."""
        return {path.name: sha256_of(path) for path in self.files[index::count]}


def one_digest(hashes: dict[str, str]) -> str:
    """One SHA-256 for a set of files, from each one's own."""
    return json_digest(sorted(hashes.items()))


def find_weights(folder: Path, reference: nn.Module, *, trusted: bool) -> Weights:
    """What the files of a folder hold for a model; a parameter that they lack, or of another shape, is a UserError."""
    files = weight_files(folder)
    if files is None:
        return Weights(folder, tuple(sorted(folder.glob("pytorch_model*.bin"))), None, trusted)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        stored |= read_header(file)[0]
    sources = understand(stored, reference)
    if sources is not None:
        check_complete(folder, sources, reference)
    return Weights(folder, tuple(files), sources, trusted)


def understand(stored: dict[str, StoredTensor], reference: nn.Module) -> dict[str, Source] | None:
    """Which stored tensors make which parameter, by the family's own rules in transformers."""
    names = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
    if {name for name in names if not name.endswith(ADDED)} <= set(stored) | tied_names(reference):
        return {name: Source((tensor,), None) for name, tensor in stored.items() if name in names}
    try:
        return dict(converted(stored, reference))
    except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:  # another transformers than known
        log.info("the layout of these weights is left to transformers: %s: %s", type(error).__name__, error)
        return None


def converted(stored: dict[str, StoredTensor], reference: nn.Module) -> Iterator[tuple[str, Source]]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(reference)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    state = reference.state_dict()
    prefix = str(reference.base_model_prefix)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    merged: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if pattern is None:
            yield target, Source((stored[key],), None)
        else:
            merged.setdefault(target, []).append((key, pattern))
    for target, keys in merged.items():
        rule = by_pattern[keys[0][1]]
        if len(rule.target_patterns) != 1:
            raise ValueError(f"{target} and others are made of the same tensors")
        yield target, Source(tuple(stored[key] for key, _ in keys), _merging(rule, target, keys, stored, reference))


def _merging(
    rule: Any, target: str, keys: list[tuple[str, str]], stored: dict[str, StoredTensor], reference: nn.Module
) -> Callable[[], Tensor]:
    def convert() -> Tensor:
        once = copy.deepcopy(rule)  # it collects tensors; its own copy() is not there in transformers 5.17
        for key, pattern in keys:
            once.add_tensor(target, key, pattern, stored[key].whole)
        made = once.convert(target, model=reference, config=reference.config)[target]
        result: Tensor = made[0] if isinstance(made, list) else made
        return result

    return convert


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that are another name's parameter."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def check_complete(folder: Path, sources: dict[str, Source], reference: nn.Module) -> None:
    resizable = embedding_names(reference)
    missing, wrong = [], []
    for name, parameter in reference.named_parameters():
        if name.endswith(ADDED):
            continue
        source = sources.get(name)
        if source is None:
            missing.append(name)
        elif source.convert is None:
            stored, wanted = source.parts[0].shape, tuple(parameter.shape)
            grows = name in resizable and stored[1:] == wanted[1:] and stored[0] <= wanted[0]
            if stored != wanted and not grows:
                wrong.append(f"{name}: {stored} in the files, {wanted} in the model")
    if missing or wrong:
        raise UserError(
            f"the weights of {folder} cannot be loaded",
            evidence=f"the files lack {', '.join(sorted(missing)[:5])}" if missing else "\n".join(wrong[:5]),
        )


def check_same_frozen(theirs: dict[str, Any], ours: dict[str, Any], *, where: str) -> None:
    """A checkpoint of adapters belongs to the weights they were trained beside: those must still be the same.

    Both are what a manifest says about a model.
    """
    before, now = theirs.get("frozen") or {}, ours.get("frozen") or {}
    if before.get("sha256") != now.get("sha256"):
        raise UserError(
            f"{where} was trained beside other weights than the run's model now has",
            evidence=f"{before.get('path')} with SHA-256 {before.get('sha256')}\n"
            f"{now.get('path')} with SHA-256 {now.get('sha256')}",
            fix="put the model's former files back, or begin again with --fresh",
        )


def embedding_names(model: nn.Module) -> set[str]:
    """Parameters with one row per token."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    weights = {id(end.weight) for end in ends if end is not None}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def load_pretrained(model: nn.Module, weights: Weights, ranks: Ranks, *, new_rows: bool) -> None:
    """Fill a spread model with its own weights; with `new_rows` also the rows of tokens that were added to it."""
    if weights.sources is None:
        log.info("rank 0 reads all of %s and sends the others their parts: slices cannot be read of it", weights.folder)
        _load_through_first_rank(model, weights, ranks)
        return
    sources = weights.sources

    def read() -> None:
        try:
            _read(model, sources, new_rows=new_rows)
        except OSError as error:
            raise _cannot_load(weights, f"rank {ranks.rank}: {error}") from None

    on_every_rank(ranks, read)


def _cannot_load(weights: Weights, evidence: str) -> UserError:
    return UserError(f"the weights of {weights.folder} cannot be loaded", evidence=evidence)


def _read(model: nn.Module, sources: dict[str, Source], *, new_rows: bool) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLoraLinear):
            module.nf4.set(sources[f"{name}.weight"].whole())
    for name, target in model.named_parameters():
        if not name.endswith(ADDED):
            sources[name].read_into(target)
    for name, module in rows_modules(model).items() if new_rows else ():
        rows: Tensor = getattr(module, ROWS)
        whole = sources.get(f"{name}.weight")
        if whole is not None:  # a tied head has its rows from the embedding
            fill(rows, first_rows(whole.parts[0], module.first_new, rows.shape[0]))


def first_rows(stored: StoredTensor, first: int, count: int) -> Tensor:
    """What a model's files hold in the rows of new tokens; the mean of all rows where they hold none."""
    rows = mean_row(stored).expand(count, -1).clone()
    for row, part in stored.chunks(min(first, stored.shape[0]), min(first + count, stored.shape[0])):
        rows[row - first : row - first + part.shape[0]] = part
    return rows


def read_tensor(weights: Weights, name: str, like: Tensor) -> Tensor:
    """One tensor of a model's files, whole and in fp32."""
    assert weights.sources is not None  # adapters are not trained beside others
    value = torch.empty(like.shape)
    weights.sources[name].read_into(value)
    return value


def _load_through_first_rank(model: nn.Module, weights: Weights, ranks: Ranks) -> None:
    """Only rank 0 ever holds the whole model, so host memory does not grow with the number of ranks."""
    source: dict[str, Tensor] = {}
    problem = None
    if ranks.is_first:
        try:
            source = _read_through_transformers(weights)
            lacking = [name for name, _ in model.named_parameters() if name not in source]
            if lacking:
                raise ValueError(f"the model has {lacking[0]}, the files do not")
        except Exception as error:  # of whatever kind: the other ranks wait to hear of it
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problem = ranks.broadcast(problem, patient=True)
    if problem:
        raise _cannot_load(weights, problem)
    for name, target in model.named_parameters():
        full = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
        if ranks.is_first:
            full.copy_(source.pop(name))
        if ranks.world_size > 1:
            dist.broadcast(full, src=0)
        fill(target, full)


def _read_through_transformers(weights: Weights) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        weights.folder, dtype="auto", trust_remote_code=weights.trusted, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"the files lack {', '.join(sorted(report['missing_keys'])[:5])}")
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}
