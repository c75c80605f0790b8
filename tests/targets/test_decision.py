"""What follows the end of an attempt, and how torchrun's own words are read."""

import pytest

from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath, Restart, RestartBudget, decide, parse_deaths

KILLED = RankDeath(1, -9, "t")
LOST_PEER = {"rank": 0, "error": "rank 1 is gone", "retry": True}
NOT_FINITE = {"rank": 0, "error": "the loss is not finite", "retry": False, "exit_code": 1}
SAVED = {"event": "checkpoint", "step": 10}


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
    ],
)
def test_an_end_that_is_final(end, state, code):
    done = decide(end, RestartBudget(3))
    assert isinstance(done, Done)
    assert (done.state, done.code) == (state, code)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (AttemptEnd(1, deaths=[KILLED]), "rank 1 was killed by SIGKILL"),
        (AttemptEnd(1, errors=[LOST_PEER], deaths=[RankDeath(0, 1, "t")]), "rank 0: rank 1 is gone"),
        (AttemptEnd(1, deaths=[RankDeath(0, 75, "t")]), "rank 0 exited with code 75"),  # its disk was full, say
        (AttemptEnd(-9), "torchrun was killed by SIGKILL"),
        (AttemptEnd(1, errors=[LOST_PEER]), "rank 0: rank 1 is gone"),
    ],
)
def test_an_end_that_is_answered_by_a_restart(end, why):
    assert decide(end, RestartBudget(1)) == Restart(why)
    given_up = decide(end, RestartBudget(0))
    assert isinstance(given_up, Done)
    assert given_up.reason.startswith(why)


def test_only_a_newer_checkpoint_fills_the_budget_up_again():
    budget = RestartBudget(2, newest_checkpoint=5)
    budget.used = 2
    budget.note(AttemptEnd(1).newest_checkpoint)
    budget.note(5)
    assert budget.left == 0
    budget.note(AttemptEnd(1, [SAVED]).newest_checkpoint)
    assert budget.left == 2
    budget.used = 1
    budget.note(10)
    assert budget.left == 1


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
