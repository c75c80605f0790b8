"""Flight recorders: which rank did not come, and ranks that took different paths."""

from __future__ import annotations

import pickle

import pytest

from tests.diagnose.test_verdict import PROGRESS, WATCHDOG
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.bundle import facts_of_run
from windlass.runfolder import RunFolder


def entries(last, operation="nccl:all_reduce", state="started", sizes=((4096,),)):
    done = [
        {"collective_seq_id": number, "profiling_name": "nccl:all_reduce", "state": "completed"} for number in (1, 2)
    ]
    end = {"collective_seq_id": last, "profiling_name": operation, "state": state}
    return [{"process_group": ("0", "default_pg"), "input_sizes": sizes, **entry} for entry in (*done, end)]


def facts_with(**dumps):
    recorders = {rank: {"entries": found} for rank, found in dumps.items()}
    return {"logs": {"rank0": f"{PROGRESS}\n{WATCHDOG}"}, "flight_recorders": recorders}


def test_the_rank_that_did_not_come_is_named():
    behind = entries(3, state="completed")
    verdict = diagnose(Facts.read(facts_with(rank0=entries(7), rank1=behind, rank2=entries(7))))
    assert verdict.name == "collective_timeout"
    told = next(proof for proof in verdict.evidence if proof.rank == 1)
    assert told.line == (
        "rank 1 did not come to nccl:all_reduce of ((4096,),), number 7 of group 0 default_pg, in which ranks 0, 2 wait"
    )


def test_ranks_in_different_collectives_took_different_paths():
    other = entries(7, operation="nccl:broadcast")
    verdict = diagnose(Facts.read(facts_with(rank0=entries(7), rank1=other)))
    assert verdict.name == "collective_mismatch"
    assert {proof.rank for proof in verdict.evidence[:2]} == {0, 1}


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a dump ran code",))


def test_dumps_of_a_run_are_facts_and_run_no_code(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    (folder.logs / "nccl-trace-rank-0").write_bytes(pickle.dumps({"entries": entries(7), "version": "2.9"}))
    (folder.logs / "nccl-trace-rank-1").write_bytes(pickle.dumps({"entries": [Evil()]}))
    (folder.logs / "nccl-trace-rank-2").write_bytes(b"cut")
    recorders = facts_of_run(folder)["flight_recorders"]
    assert list(recorders) == ["rank0"]
    assert recorders["rank0"]["entries"][-1]["collective_seq_id"] == 7
