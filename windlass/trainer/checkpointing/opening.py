"""Open the tiers that a run asks for; what is wrong with one is said here, before anything is trained."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from windlass.checkpoint import NODE_TIERS, CheckpointFolder
from windlass.checkpoint.managed import ManagedService
from windlass.checkpoint.ownership import begin_anew, known_to, node_folder, read_id, write_id
from windlass.checkpoint.pieces import clear_earlier_runs, make_private, tier_path
from windlass.checkpoint.stored import StoredCheckpoints, current_id, write_current_id
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.store import Store, StoreOptions, open_store
from windlass.trainer.checkpointing.managed_tier import ManagedTier
from windlass.trainer.checkpointing.node_tier import NodeTier
from windlass.trainer.checkpointing.store_tier import Uploads
from windlass.trainer.checkpointing.tiers import Tier
from windlass.trainer.distributed.agreement import on_every_rank, on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenTiers:
    quick: list[Tier]  # beside the run folder, in the order they are written
    stored: StoredCheckpoints | None
    uploads: Uploads | None


def open_tiers(run: Run, folder: RunFolder, ranks: Ranks, faults: Faults, protected: set[int]) -> OpenTiers:
    spec = run.checkpoint
    quick: list[Tier] = []
    if not any((spec.memory_every, spec.local_every, spec.managed_every, spec.store)):
        return OpenTiers(quick, None, None)
    store = open_store(spec.store, StoreOptions(patience_s=float(spec.upload_seconds))) if spec.store else None
    run_id = _agree_on_id(folder, store, ranks)
    for name in NODE_TIERS:
        root, every = tier_path(spec, name), getattr(spec, f"{name}_every")
        if root and every:
            place = node_folder(root, folder, run_id)
            on_every_rank(ranks, partial(make_private, root, place, tier=name))
            tier = NodeTier(name, every, CheckpointFolder(place), ranks, faults)
            for gone in clear_earlier_runs(root, folder, run_id) if tier.leads else ():
                log.info("removing %s of the %s tier: it is of an earlier run of this folder", gone, name)
            if name == "memory" and tier.nodes.count == 1 and ranks.is_first:
                log.info("one node: the memory tier has no peer and survives the death of processes alone")
            quick.append(tier)
    if spec.managed_every:
        service = ManagedService.connect(
            run.name, run_id, rank=ranks.rank, world_size=ranks.world_size, endpoint=spec.managed_endpoint
        )
        quick.append(ManagedTier(spec.managed_every, service, ranks, faults))
    if store is None:
        return OpenTiers(quick, None, None)
    stored = StoredCheckpoints.of_run(store, run.name, run_id)
    return OpenTiers(quick, stored, Uploads(spec, folder, stored, ranks, faults, protected))


def _agree_on_id(folder: RunFolder, store: Store | None, ranks: Ranks) -> str:
    """The id in the run folder; on a new machine the one that the store knows; else a new one."""
    return str(on_first_rank(ranks, lambda: _find_id(folder, store)))


def _find_id(folder: RunFolder, store: Store | None) -> str:
    run_id = read_id(folder)
    if store is None:
        return run_id or begin_anew(folder)
    if run_id and known_to(folder, store.url):
        return run_id  # nothing is asked of the store: it may be down, and training must go on
    registered = current_id(store, folder.name)
    if run_id is None:
        run_id = registered or begin_anew(folder)
    if run_id != registered:
        write_current_id(store, folder.name, run_id)  # also the proof that this machine may write there
    write_id(folder, run_id, known_to=store.url)
    return run_id
