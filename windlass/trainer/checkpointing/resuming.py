"""Find the newest checkpoint that is whole and is this run's, in the nearest tier that has it.

Begin a new run with a checkpoint of another: it is linked into the new run's folder as if that had saved it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from windlass.checkpoint import TIERS, CheckpointFolder, Manifest
from windlass.checkpoint.folder import Damage, link_or_copy, step_name
from windlass.checkpoint.pruning import LASTING
from windlass.common.files import json_digest, read_json_lines, whole
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.trainer.checkpointing.saving import Checkpointer
from windlass.trainer.checkpointing.store_tier import store_offers
from windlass.trainer.checkpointing.tiers import Offer
from windlass.trainer.model.lora import lora_layers

log = logging.getLogger(__name__)
# Of a configuration: where it came from, how it is computed, how text is generated. The trained model is the same.
NOT_THE_MODEL = frozenset(
    (
        *("transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "attn_implementation", "experts_implementation"),
        *("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "id2label", "label2id"),
        *("problem_type", "finetuning_task", "task_specific_params", "name_or_path"),
    )
)
ABSENT = object()
NAMED = 12

# What the data and the tokenizer of a run are by their content; checkpoints of earlier versions do not say it.
CONTENT = frozenset({"data_fingerprint", "tokenizer_fingerprint"})


def newest_whole(checkpointer: Checkpointer) -> Offer | None:
    """The newest step that is whole as far as is known before it is loaded, of equal ones the nearest; those that are
    not are named and passed over.
    """
    folder, ranks = checkpointer.folder, checkpointer.ranks
    offers = [offer for tier in checkpointer.quick for offer in tier.offers()] + checkpointer.shared.offers()
    if checkpointer.stored:
        further, problem = store_offers(checkpointer.stored, ranks, checkpointer.faults)
        saved = ranks.broadcast(_last_stored(folder), patient=True)
        if problem and saved > max((offer.step for offer in offers), default=-1):
            raise UserError(
                "the store cannot be asked for checkpoints, and "
                + ("those here are older" if offers else "there are none here"),
                evidence=problem,
                cause=f"step {saved} was saved there, and what was trained up to it would be thrown away"
                if saved
                else "starting over might leave behind what was trained before",
                fix="make the store reachable, or checkpoint.store=null to begin without it",
            )
        if problem and ranks.is_first:
            log.warning("the store cannot be asked for newer checkpoints, going on with what is here: %s", problem)
        offers += further
    offers.sort(key=lambda offer: (-offer.step, TIERS.index(offer.tier)))
    for offer in offers:
        if (offer.tier, offer.step) in checkpointer.damaged:
            continue
        reason = _cannot_serve(offer, checkpointer.layout)
        if reason:
            if ranks.is_first:
                log.warning("%s is passed over: %s", offer.where, reason)
                folder.record("checkpoint-passed-over", tier=offer.tier, step=offer.step, reason=reason)
            continue
        damages = offer.prove()
        if not damages:
            return offer
        _pass_over(offer, damages, checkpointer)
    if offers:
        raise _none_is_whole(offers, checkpointer)
    return None


def load(offer: Offer, state: dict[str, Tensor], checkpointer: Checkpointer) -> bool:
    """Fill the state; False if the step turned out to be damaged, and will not be found again."""
    damages = offer.load(state)
    if damages:
        _pass_over(offer, damages, checkpointer)
    return not damages


def _pass_over(offer: Offer, damages: list[Damage], checkpointer: Checkpointer) -> None:
    name = step_name(offer.step)
    checkpointer.damaged.add((offer.tier, offer.step))
    for damage in damages if checkpointer.ranks.is_first else ():
        log.warning("%s is damaged and passed over: %s: %s (%s tier)", name, damage.file, damage.reason, offer.tier)
        checkpointer.folder.record("checkpoint-damaged", checkpoint=name, **asdict(damage), tier=offer.tier)


def _cannot_serve(offer: Offer, layout: dict[str, Any]) -> str | None:
    """Pieces are of one number of ranks and one sharding; checkpoints in the run folder and the store are of any."""
    if offer.tier in LASTING:
        return None
    theirs = offer.manifest.layout or {}
    different = [
        f"{key} {theirs.get(key)} there, {layout.get(key)} here"
        for key in sorted({*theirs, *layout})
        if theirs.get(key) != layout.get(key)
    ]
    return "; ".join(different) or None


def _none_is_whole(offers: list[Offer], checkpointer: Checkpointer) -> UserError:
    name = checkpointer.folder.name
    steps = ", ".join(str(step) for step in sorted({offer.step for offer in offers}))
    if all(_cannot_serve(offer, checkpointer.layout) for offer in offers):
        return UserError(
            "the only checkpoints of this run are of another number of ranks or another sharding",
            evidence=f"steps {steps}: {_cannot_serve(offers[0], checkpointer.layout)}",
            cause="the run folder and the store, which serve any, have none yet",
            fix="start it as it was started before, or begin again with --fresh",
        )
    return UserError(
        f"none of the {len(offers)} checkpoints of this run is whole",
        evidence=f"steps {steps}; `windlass ckpt verify {name}` names the files",
        fix="restore one of them, or begin again with --fresh",
    )


def check_same_run(manifest: Manifest, *, model: dict[str, Any], order: dict[str, Any], where: str) -> None:
    """A checkpoint of another model, or of other data in another order, must not be continued by accident."""
    check_same_model(
        manifest.model, model, where=where, fix="give this run another name (name=…), or begin again with --fresh"
    )
    unknown = unknown_content(manifest, order)
    if unknown:
        log.warning(
            "whether %s was made with the same content is not known: it has no %s", where, ", no ".join(unknown)
        )
    keys = different_order(manifest, order)
    if keys:
        raise UserError(
            f"{where} was made with other data or another order",
            evidence="\n".join(f"{key}: {manifest.order.get(key)!r} there, {order.get(key)!r} here" for key in keys),
            cause="the names are the same, but the content of the files has changed since"
            if CONTENT.issuperset(keys)
            else "going on would read some sequences twice and others never",
            fix="give this run another name (name=…), or begin again with --fresh",
        )


def different_order(manifest: Manifest, order: dict[str, Any]) -> list[str]:
    """Keys of the data, or of the order in which it is read, that are not as they were when a checkpoint was made.

    Another global batch is not among them: the number of sequences read says where to go on. Only the lanes of a stream
    belong to places of one batch.
    """
    free = set(unknown_content(manifest, order)) | ({"global_batch"} if manifest.data_state is None else set())
    return sorted(key for key in {*manifest.order, *order} - free if manifest.order.get(key) != order.get(key))


def unknown_content(manifest: Manifest, order: dict[str, Any]) -> list[str]:
    """Fingerprints of content that a checkpoint of an earlier version, or a source that cannot tell, does not have."""
    return sorted(key for key in CONTENT if manifest.order.get(key) is None or order.get(key) is None)


def check_same_model(theirs: dict[str, Any], ours: dict[str, Any], *, where: str, fix: str) -> None:
    """Weights fit models that compute something else with them: other heads, another rotation, another activation.

    Both are what a manifest says about a model, `theirs` perhaps of an older windlass or another transformers.
    """
    different = list(_differing_settings(theirs, ours))
    if not different and theirs.get("fingerprint") == ours["fingerprint"]:
        return
    raise UserError(
        f"{where} is of another model",
        evidence="\n".join(different[:NAMED]) or "parameter names or shapes differ",
        cause="its weights were trained with those settings" if different else None,
        fix=fix,
    )


def model_settings(config: Any, reference: nn.Module) -> dict[str, Any]:
    """Everything of a model that parameter names and shapes do not say, for a manifest and to compare with one."""
    import transformers

    settings = _plain(config.to_dict())
    scales = sorted({layer.lora_scale for layer in lora_layers(reference).values()})
    if scales:
        settings["lora_scale"] = scales
    return {
        "settings": settings,
        "settings_fingerprint": json_digest(settings)[:16],
        "transformers": transformers.__version__,
    }


def _differing_settings(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    if "settings" not in theirs:  # of an older windlass, which noted only what differs from the class's defaults
        return _differences(_plain(theirs.get("config") or {}), ours["settings"], same_keys=False)
    same = theirs.get("transformers") == ours["transformers"]  # another version knows other settings
    return _differences(_plain(theirs["settings"]), ours["settings"], same_keys=same)


def _differences(theirs: Any, ours: Any, *, same_keys: bool, name: str = "") -> Iterator[str]:
    """Every setting that differs, by its dotted name; with `same_keys` also those that only one side has."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours if same_keys else theirs.keys() & ours):
            inner = f"{name}.{key}" if name else key
            yield from _differences(theirs.get(key, ABSENT), ours.get(key, ABSENT), same_keys=same_keys, name=inner)
    elif theirs != ours:
        saved, current = ("not set" if value is ABSENT else repr(value) for value in (theirs, ours))
        yield f"{name}: {saved} there, {current} here"


def _plain(value: Any) -> Any:
    """A configuration as JSON has it, without what does not change the model."""
    if isinstance(value, dict):
        kept = {str(key): _plain(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if key not in NOT_THE_MODEL and not key.startswith("_")}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def refuse_to_start_over(folder: RunFolder) -> None:
    """A run that has saved steps, of which none is left anywhere, must not begin at step 0 without a word."""
    saves = [record for record in read_json_lines(folder.history) if record.get("event") in ("checkpoint", "uploaded")]
    lasting = sorted({int(record["step"]) for record in saves if record.get("tier", "shared") in LASTING})
    if lasting:
        raise UserError(
            f"the checkpoints of {folder.name} are gone",
            evidence=f"{folder.history} tells of saves up to step {lasting[-1]}, and {folder.checkpoints} holds none",
            cause="going on would mean to train again from step 0",
            fix="put the checkpoints back, or begin again with --fresh",
        )
    if saves:  # in memories or on disks of nodes alone: nodes may be lost
        newest = max(int(record["step"]) for record in saves)
        log.warning("step %d was saved on the nodes alone, and none of them has it any more: from step 0", newest)
        folder.record("started-over", step=newest)


def _last_stored(folder: RunFolder) -> int:
    """The step that was saved in the store last, as far as this folder knows; 0 if none was."""
    steps = [
        whole(record.get("step")) or 0
        for record in read_json_lines(folder.history)
        if record.get("event") == "uploaded" or (record.get("event"), record.get("tier")) == ("checkpoint", "store")
    ]
    return steps[-1] if steps else 0


def take_over(branch_from: str, folder: RunFolder, *, order: dict[str, Any]) -> None:
    """Put the checkpoint `RUN@STEP` of a run beside this one into this run's folder. Rank 0 calls it."""
    name, _, step = branch_from.rpartition("@")
    source = RunFolder(folder.path.parent / name)
    checkpoint = CheckpointFolder(source.checkpoints).choose(int(step))
    damages = list(checkpoint.damages())
    if damages:
        raise UserError(
            f"{branch_from} cannot be branched from: it is damaged",
            evidence="\n".join(f"{damage.file}: {damage.reason}" for damage in damages),
            fix=f"windlass ckpt ls {name}    lists the others",
        )
    manifest = checkpoint.manifest()
    changed = different_order(manifest, order)
    if changed:  # other data begins at its beginning; where the old data stood says nothing about it
        manifest = replace(manifest, order=order, data_state=None, sequences=0)
    own = CheckpointFolder(folder.checkpoints).at(checkpoint.step)
    own.path.mkdir(parents=True, exist_ok=True)
    try:
        for file in manifest.files:
            link_or_copy(checkpoint.path / file, own.path / file)
    except FileNotFoundError as error:
        raise UserError(
            f"{branch_from} was removed while it was branched from",
            evidence=str(error),
            cause=f"{name} still trains, and keeps its newest checkpoints only",
            fix=f"--from {name}    takes its newest",
        ) from None
    own.publish(replace(manifest, validation=None))  # the best of another run is not this one's
    data = f"other data, from its beginning: {'; '.join(changed)}" if changed else "the data goes on"
    folder.record("branched", source=name, step=checkpoint.step, data=data)
    log.info("branched from step %d of %s; %s", checkpoint.step, name, data)
