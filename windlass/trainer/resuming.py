"""Find the newest checkpoint that is whole and is this run's, in the nearest tier that has it."""

from __future__ import annotations

import logging
from typing import Any

from windlass.checkpoint import Manifest
from windlass.errors import UserError
from windlass.trainer.saving import Checkpointer
from windlass.trainer.tiers import ORDER, Offer
from windlass.trainer.tiers_store import store_offers

log = logging.getLogger(__name__)

# What the data and the tokenizer of a run are by their content; checkpoints of earlier versions do not say it.
CONTENT = frozenset({"data_fingerprint", "tokenizer_fingerprint"})


def newest_whole(checkpointer: Checkpointer) -> Offer | None:
    """The newest step that is whole, of equal ones the nearest; those that are not are named and passed over."""
    folder, ranks = checkpointer.folder, checkpointer.ranks
    offers = [offer for tier in (*checkpointer.quick, checkpointer.shared) for offer in tier.offers()]
    if checkpointer.stored:
        further, problem = store_offers(checkpointer.stored, checkpointer.checkpoints, ranks)
        if problem and not offers:
            raise UserError(
                "the store cannot be asked for checkpoints, and there are none here",
                evidence=problem,
                cause="starting over might leave behind what was trained before",
                fix="make the store reachable, or checkpoint.store=null to begin without it",
            )
        if problem and ranks.is_first:
            log.warning("the store cannot be asked for newer checkpoints, going on with what is here: %s", problem)
        offers += further
    offers.sort(key=lambda offer: (-offer.step, ORDER.index(offer.tier)))
    for offer in offers:
        reason = _cannot_serve(offer, checkpointer.layout)
        if reason:
            if ranks.is_first:
                log.warning("%s is passed over: %s", offer.where, reason)
                folder.record("checkpoint-passed-over", tier=offer.tier, step=offer.step, reason=reason)
            continue
        damages = offer.prove()
        if not damages:
            return offer
        name = f"step-{offer.step:08d}"
        for file, reason in damages if ranks.is_first else ():
            log.warning("%s is damaged and passed over: %s: %s (%s tier)", name, file, reason, offer.tier)
            folder.record("checkpoint-damaged", checkpoint=name, file=file, reason=reason, tier=offer.tier)
    if offers:
        raise _none_is_whole(offers, checkpointer)
    return None


def _cannot_serve(offer: Offer, layout: dict[str, Any]) -> str | None:
    """Pieces are of one number of ranks and one sharding; checkpoints in the run folder and the store are of any."""
    if offer.tier in ("shared", "store"):
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
    if manifest.model["fingerprint"] != model["fingerprint"]:
        theirs, ours = manifest.model["config"], model["config"]
        different = [
            f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key)
        ]
        raise UserError(
            f"{where} is of another model",
            evidence="\n".join(different[:6]) or "parameter names or shapes differ",
            fix="give this run another name (name=…), or begin again with --fresh",
        )
    unknown = {key for key in CONTENT if manifest.order.get(key) is None or order.get(key) is None}
    if unknown:
        log.warning(
            "whether %s was made with the same content is not known: it has no %s", where, ", no ".join(unknown)
        )
    keys = sorted(key for key in {*manifest.order, *order} - unknown if manifest.order.get(key) != order.get(key))
    if keys:
        raise UserError(
            f"{where} was made with other data or another order",
            evidence="\n".join(f"{key}: {manifest.order.get(key)!r} there, {order.get(key)!r} here" for key in keys),
            cause="the names are the same, but the content of the files has changed since"
            if CONTENT.issuperset(keys)
            else "going on would read some sequences twice and others never",
            fix="give this run another name (name=…), or begin again with --fresh",
        )
