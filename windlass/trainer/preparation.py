"""Before anything is written: open the model's structure and the data, report mistakes, and decide the run's layout."""

from __future__ import annotations

import math
import socket
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.data import Sequences, open_sequences
from windlass.data.sequences.fingerprints import data_fingerprint, tokenizer_fingerprint
from windlass.data.sequences.mixing import Mixture
from windlass.data.sequences.opening import tokenizer_of
from windlass.data.sequences.stream import Stream
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.plan.fitting import batch_shape
from windlass.plan.layout import LEAN, Facts, Layout, effective_sharding, flash4_unsuited
from windlass.spec import Run
from windlass.trainer.distributed.ranks import Ranks, gloo_group, local_world_size
from windlass.trainer.fast.attention import obstacle_to_flash4
from windlass.trainer.fast.lean_lora import obstacle_to_lean_lora
from windlass.trainer.model.adapters import Adapter, check_adapter, open_adapter
from windlass.trainer.model.hub_files import Located, locate
from windlass.trainer.model.lora import adapt, lora_layers
from windlass.trainer.model.new_tokens import add_rows
from windlass.trainer.model.pretrained import Weights, find_weights
from windlass.trainer.model.structure import ModelFacts, blocks, facts, meta_model, model_config, shape_of, weights_path
from windlass.trainer.startup import clock


@dataclass(frozen=True)
class Prepared:
    config: Any  # transformers configuration
    reference: nn.Module  # the model on the meta device, with its adapters, neither sharded nor wrapped
    facts: ModelFacts
    sequences: Sequences
    validation: Sequences | None
    order: dict[str, Any]  # everything the order of sequences depends on
    weights: Weights | None  # of the model itself, where the run begins with them
    adapter: Adapter | None  # that the run begins with
    added: tuple[int, int] | None  # ids [first, end) of tokens that were added to the model's
    layout: Layout
    frozen: dict[str, Any] | None  # which weights those are that a checkpoint of adapters does not hold

    def model_identity(self) -> dict[str, Any]:
        identity = self.facts.as_dict(self.config)
        return identity | {"frozen": self.frozen} if self.frozen else identity


def prepare(run: Run, ranks: Ranks) -> Prepared:
    located = locate(run, ranks)
    adapter = open_adapter(run)
    config, added, reference = structure(run, located, adapter)
    size = facts(reference)
    weights = find_weights(located.weights, reference, trusted=run.model.trust_remote_code) if located.weights else None
    if weights and weights.sources is None and (run.model.lora or run.data.special_tokens):
        raise UserError(
            f"the weights of {weights.folder} can only be read whole, as they are",
            evidence="they are in pytorch_model.bin"
            if weights.files[:1] and weights.files[0].suffix == ".bin"
            else None,
            cause="model.lora and data.special_tokens read them tensor by tensor",
            fix="AutoModelForCausalLM.from_pretrained(…).save_pretrained(FOLDER)    writes safetensors",
        )
    frozen = None
    if run.model.lora:
        assert weights is not None
        frozen = {"path": weights_path(run.model), "revision": run.model.revision, "sha256": weights.digest(ranks)}
        if adapter:
            check_adapter(adapter, reference, model_sha256=str(frozen["sha256"]))
    tokenizer = located.tokenizer
    sequences = open_sequences(run, "train", tokenizer=tokenizer)
    assert sequences is not None
    if sequences.vocab_size > size.vocab_size:
        raise UserError(
            f"the tokenizer {run.data.tokenizer} has {sequences.vocab_size:,} tokens, the model {size.vocab_size:,}",
            cause="a token beyond the model's embedding has no row there",
            fix=f"data.tokenizer=… (the model's own), or model.config.vocab_size={sequences.vocab_size}",
        )
    validation = open_sequences(run, "validation", tokenizer=tokenizer)
    share_streams(sequences, ranks)
    share_streams(validation, ranks)
    return Prepared(
        config=config,
        reference=reference,
        facts=size,
        sequences=sequences,
        validation=validation,
        order=_order(run, sequences, ranks),
        weights=weights,
        adapter=adapter,
        added=added,
        layout=resolve_layout(run, reference, config, ranks),
        frozen=frozen,
    )


def share_streams(sequences: Sequences | None, ranks: Ranks) -> None:
    """Let ranks agree on who reads which file of a stream. Every rank calls this together."""
    streams = sequences.parts if isinstance(sequences, Mixture) else [sequences]
    if ranks.world_size < 2 or not any(isinstance(stream, Stream) for stream in streams):
        return
    # A group of its own: batches are read by a thread, while the loop uses the others. Slow networks are no hang.
    group = gloo_group(timedelta(hours=2))

    def exchange(lanes: Collection[int], num_lanes: int) -> list[int]:
        needs_file = torch.zeros(num_lanes, dtype=torch.uint8)
        needs_file[list(lanes)] = 1
        dist.all_reduce(needs_file, op=dist.ReduceOp.MAX, group=group)
        return [int(lane) for lane in needs_file.nonzero().flatten()]

    assert isinstance(sequences, Mixture | Stream)
    sequences.share(exchange)


def structure(run: Run, located: Located, adapter: Adapter | None) -> tuple[Any, tuple[int, int] | None, nn.Module]:
    """The configuration, the ids of added tokens, and the model on the meta device with what is added to it."""
    added = added_tokens(run, located.tokenizer)
    config = model_config(run, folder=located.model, vocab_size=added[1] if added else 0)
    return config, added, build(config, run, adapter, added, quantize=False)


def build(
    config: Any, run: Run, adapter: Adapter | None, added: tuple[int, int] | None, *, quantize: bool
) -> nn.Module:
    model = meta_model(config, run)
    adapt(model, run, targets=adapter.targets if adapter else None, quantize=quantize)
    if added and run.model.lora:
        add_rows(model, added[0], added[1] - added[0])
    return model


def added_tokens(run: Run, tokenizer: str | None = None) -> tuple[int, int] | None:
    """The ids [first, end) of the tokens that the run adds to the tokenizer; None where it adds none."""
    if not run.data.special_tokens:
        return None
    loaded: Tokenizer = tokenizer_of(run.data, tokenizer)
    return loaded.ids_of_added(run.data.special_tokens)


def content_of(run: Run, sequences: Sequences, ranks: Ranks) -> dict[str, Any]:
    """Fingerprints of the data and its tokenizer. Every rank calls this together; ranks that read other data refuse."""
    streams = sequences.parts if isinstance(sequences, Mixture) else [sequences]
    known = ranks.is_first or not any(isinstance(stream, Stream) for stream in streams)  # files are looked at once
    own = {
        "data_fingerprint": data_fingerprint(sequences, run.data) if known else None,
        "tokenizer_fingerprint": tokenizer_fingerprint(sequences),
    }
    # the first rank alone may read terabytes of files here for their digests, the first time
    everyone = ranks.gather((socket.gethostname(), own if known else None), patient=True)
    first_host, content = everyone[0]
    for host, other in everyone:
        if other is not None and other != content:
            raise UserError(
                f"{host} reads other data than {first_host}",
                evidence="\n".join(f"{key}: {content[key]} on {first_host}, {other[key]} on {host}" for key in content),
                cause="the files of that name differ between the machines",
                fix="copy the same data to all of them, or use a shared folder or s3://…",
            )
    assert isinstance(content, dict)
    return content


def _order(run: Run, sequences: Sequences, ranks: Ranks) -> dict[str, Any]:
    data = run.data.model_dump(
        mode="json",
        include={
            "source",
            "sources",
            "config",
            "split",
            "files",
            "text_field",
            "tokenizer",
            "sequence_length",
            "document_mask",
            "shuffle",
            "holdout",
        },
    )
    for source in data.get("sources", ()):
        if source["revision"] is None:  # checkpoints of earlier versions do not name it
            del source["revision"]
    if run.data.format != "text":
        data |= run.data.model_dump(
            mode="json",
            include={"format", "messages_field", "prompt_field", "completion_field", "train_on", "too_long"},
        )
    if run.data.format == "preference":
        data |= run.data.model_dump(mode="json", include={"chosen_field", "rejected_field"})
    if run.data.special_tokens:
        data["special_tokens"] = list(run.data.special_tokens)
    return {
        **data,
        "num_sequences": sequences.num_sequences,
        "global_batch": run.train.global_batch,
        "seed": run.train.seed,
        **content_of(run, sequences, ranks),
    }


def resolve_layout(run: Run, model: nn.Module, config: Any, ranks: Ranks) -> Layout:
    """The layout, with facts of the built model and of this rank's device. Every rank calls this together.

    The smallest GPU decides the micro-batch: ranks with other numbers of micro-batches would begin other numbers of
    collectives, and wait for each other.
    """
    known = model_facts(run, model, config, cuda=ranks.device.type == "cuda")
    shape = shape_of(model, config)
    micro = min(ranks.gather(batch_shape(run, ranks.world_size, ranks.gpu, shape, known)))[0]
    clock.mark("data and model files")
    if run.model.attention in ("auto", "flash4") and not flash4_unsuited(run, known):
        text = config.get_text_config()
        by_name, packed = run.model.attention == "flash4", bool(run.data.document_mask)
        known = replace(known, flash4_obstacle=obstacle_to_flash4(text, ranks, asked_by_name=by_name, documents=packed))
    clock.mark("attention tried")
    return Layout.resolve(run, ranks.world_size, micro, known, local_world_size=agreed_local_size(run, ranks))


def model_facts(run: Run, model: nn.Module, config: Any, *, cuda: bool) -> Facts:
    """What a layout depends on of a model with its adapters."""
    layers, lora, obstacle = lora_layers(model), run.model.lora, ""
    known = Facts.of(config.get_text_config().to_dict(), cuda=cuda)
    if lora and known.family in LEAN:
        obstacle = next(filter(None, map(obstacle_to_lean_lora, blocks(model).values())), "")
    return replace(
        known,
        biases=any(parameter.ndim == 1 and name.endswith("bias") for name, parameter in model.named_parameters()),
        trained=facts(model).num_trained if lora else None,
        four_bits=sum(layer.weight.numel() for layer in layers.values()) if lora and lora.quantize else 0,
        lean_lora_obstacle=obstacle,
    )


def agreed_local_size(run: Run, ranks: Ranks) -> int | None:
    """Ranks of one node: of the nodes that are there and not of those asked for. None where no launcher says."""
    if effective_sharding(run, ranks.world_size) != "hybrid":
        return None
    sizes = [size for size in ranks.gather(local_world_size()) if size]
    if not run.parallel.shard_group and len(set(sizes)) > 1:
        raise UserError(
            "parallel.sharding=hybrid makes groups of a node's ranks, and nodes have different numbers of them",
            evidence=f"{min(sizes)} to {max(sizes)} ranks on a node",
            fix=f"parallel.shard_group={math.gcd(*sizes)}, or parallel.sharding=full",
        )
    return sizes[0] if sizes else None
