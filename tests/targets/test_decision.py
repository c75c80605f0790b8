"""What follows the end of an attempt, and how torchrun's own words are read."""

import pytest

from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath, follow_up, parse_deaths

KILLED = RankDeath(1, -9, "t")
LOST_PEER = {"rank": 0, "error": "rank 1 is gone", "retry": True}
NOT_FINITE = {"rank": 0, "error": "the loss is not finite", "retry": False, "exit_code": 1}


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        (AttemptEnd(0, [{"event": "finished"}]), "finished", 0),
        (AttemptEnd(0, [{"event": "preempted"}]), "preempted", 75),
        (AttemptEnd(1, [{"event": "preempted"}], terminated=True), "preempted", 75),
        (AttemptEnd(1, [{"event": "preempted", "step": 4}], stop_requested=True), "stopped", 75),
        (AttemptEnd(1, [{"event": "preempted"}], deaths=[RankDeath(0, 75, "t")]), "preempted", 75),
        (AttemptEnd(-9, stop_requested=True), "stopped", 130),
        (AttemptEnd(-9, terminated=True), "stopped", 130),
        (AttemptEnd(1, errors=[NOT_FINITE], deaths=[RankDeath(0, 1, "t")]), "failed", 1),
        (AttemptEnd(1, errors=[LOST_PEER, {**NOT_FINITE, "exit_code": 2}], deaths=[KILLED]), "failed", 2),
        (AttemptEnd(1, deaths=[RankDeath(0, 1, "t")]), "failed", 1),
        (AttemptEnd(1, errors=[LOST_PEER], full_disk="the disk of /runs/r is full"), "failed", 1),
        (AttemptEnd(1, deaths=[RankDeath(1, -9, "t5"), RankDeath(0, 1, "t0")], full_disk="full"), "failed", 1),
    ],
)
def test_an_end_that_is_final(end, state, code):
    done = follow_up(end, [], 3)
    assert isinstance(done, Done)
    assert (done.state, done.code) == (state, code)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (AttemptEnd(1, deaths=[KILLED]), "rank 1 was killed by SIGKILL"),
        (AttemptEnd(1, errors=[LOST_PEER], deaths=[RankDeath(0, 1, "t")]), "rank 0: rank 1 is gone"),
        (AttemptEnd(1, deaths=[RankDeath(0, 75, "t")]), "rank 0 exited with code 75"),  # it could not write why
        (AttemptEnd(-9), "torchrun was killed by SIGKILL"),
        (AttemptEnd(1, errors=[LOST_PEER]), "rank 0: rank 1 is gone"),
    ],
)
def test_an_end_that_is_answered_by_a_restart(end, why):
    decision = follow_up(end, [], 1)
    assert (decision.action, decision.reason, decision.left) == ("retry", why, 0)
    given_up = follow_up(end, [{"event": "restart", **decision.as_record()}], 1)
    assert isinstance(given_up, Done)
    assert given_up.reason.startswith(f"{why}; given up after 1 restart without a new checkpoint")


@pytest.mark.parametrize(
    ("error", "name", "action"),
    [
        ({"error": "Xid 79", "class": "gpu_hardware", "retry": True, "host": "n1"}, "gpu_hardware", "retry"),
        (
            {"error": "illegal access", "class": "illegal_memory_access", "retry": True},
            "illegal_memory_access",
            "retry",
        ),
        ({"error": "out of memory", "class": "cuda_oom", "retry": False}, "cuda_oom", "failed"),
        ({"error": "no such class", "class": "of another version", "retry": True}, "nccl_network", "retry"),
    ],
)
def test_a_ranks_own_error_is_the_root_and_lost_peers_are_its_echo(error, name, action):
    lost = [{"rank": rank, "error": "a peer is gone", "class": "nccl_network", "retry": True} for rank in range(3)]
    answer = follow_up(AttemptEnd(1, errors=[*lost, {"rank": 3, **error}], deaths=[RankDeath(0, 75, "t")]), [], 3)
    assert answer.name == name
    assert action == (answer.state if isinstance(answer, Done) else answer.action)
    if name != "nccl_network":
        assert error["error"] in answer.reason
    if name == "gpu_hardware":
        assert answer.exclude_nodes == ("n1",)


SUMMARY = """\
W1115 03:00:00.000 torch/distributed/elastic/multiprocessing/api.py Sending process 11 closing signal SIGTERM
============================================================
windlass.trainer FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-15_03:00:01
  host      : somewhere
  rank      : 3 (local_rank: 3)
  exitcode  : {code3} (pid: 14)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 14
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time0}
  host      : somewhere
  rank      : 0 (local_rank: 0)
  exitcode  : {code0} (pid: 11) (SIGKILL)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("code0", "time0", "code3", "order"),
    [
        (-9, "2026-11-15_03:00:00", -15, [0, 3]),
        (1, "2026-11-15_03:00:01", -9, [3, 0]),  # rank 0 lost rank 3 in the same look of torchrun
        (1, "2026-11-15_03:00:00", -15, [0, 3]),  # rank 3 was told to leave by torchrun
    ],
)
def test_torchruns_summary(code0, time0, code3, order):
    text = SUMMARY.format(code0=code0, time0=time0, code3=code3)
    assert [death.rank for death in parse_deaths(text)] == order


def test_no_summary():
    assert parse_deaths("ranks could not meet\n") == []
