"""The events of an attempt in history.jsonl: from where it trains, and how it ended."""

from __future__ import annotations

import logging
import math
from typing import Any

from windlass.common import own_code
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.model.structure import ModelFacts
from windlass.trainer.state import TrainState

log = logging.getLogger(__name__)
BEGINNINGS = ("started", "resumed")  # events that begin an attempt


class History(Callback):
    def on_start(self, state: TrainState) -> None:
        if not state.ranks.is_first:
            return
        run, ranks, step = state.run, state.ranks, state.step
        begin: dict[str, Any] = {"attempt": state.reporter.attempt, "world_size": ranks.world_size, "step": step}
        tier = state.checkpoint.tier if state.checkpoint else None
        code = own_code.source_digests(run.own_code())
        if code:
            self._compare_code(state, code)
            begin["code"] = code
        if step:
            state.folder.record("resumed", **begin, checkpoint=f"step-{step:08d}", tier=tier)
        else:
            state.folder.record("started", **begin)
        log.info(
            "%s: %s · %s · %d ranks on %s, %s sharding · %s",
            run.model.label,
            parameters(state.prepared.facts),
            state.prepared.sequences.description,
            ranks.world_size,
            ranks.device.type,
            state.prepared.layout.sharding,
            f"resumed after step {step} ({tier})" if step else "from step 0",
        )

    def _compare_code(self, state: TrainState, code: dict[str, str | None]) -> None:
        """A run goes on with the code as it is now; that it is another than before is said."""
        before = code_before(state.folder)
        changed = [key for key in code if state.step and before and before.get(key) != code[key]]
        if changed:
            state.folder.record("code-changed", keys=changed, step=state.step)
            log.warning(
                "the code of %s is not what it was: steps from here on are not those of an undisturbed run",
                ", ".join(changed),
            )

    def on_close(self, state: TrainState) -> None:
        if not state.ranks.is_first:
            return
        if state.preempted:
            only_local = {"only_local": state.only_local} if state.only_local else {}
            state.folder.record("preempted", step=state.step, **only_local)
            log.warning("stopped on request after step %d; its checkpoint is complete", state.step)
            return
        early = {"early": state.stopping.reason} if state.stopping else {}
        loss = None if math.isnan(state.last_loss) else state.last_loss
        state.folder.record("finished", step=state.step, loss=loss, **early)
        log.info("finished after step %d%s", state.step, f": {state.stopping.reason}" if state.stopping else "")


def code_before(folder: RunFolder) -> dict[str, Any]:
    """The digests of the user's code as it was last trained with. Other events have exit codes under that key."""
    recorded = [record.get("code") for record in read_json_lines(folder.history) if record.get("event") in BEGINNINGS]
    return next((code for code in reversed(recorded) if isinstance(code, dict)), {})


def parameters(facts: ModelFacts) -> str:
    if facts.num_trained == facts.num_parameters:
        return f"{facts.num_parameters:,} parameters"
    share = facts.num_trained / facts.num_parameters
    return f"{facts.num_parameters:,} parameters, {facts.num_trained:,} of them trained ({share:.2%})"
