"""What follows a verdict: budgets per class, counted in the history alone, filled up by progress."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.diagnose.classes import CLASSES
from windlass.diagnose.decision import FREE, Policy, Remedy, decide, excluded, verdict_of

POLICY = Policy(restarts=3, edits=2)
EDIT = Remedy({"train.micro_batch": 1}, "the micro-batch is halved")


def run_into(names, policy=POLICY, history=(), remedies=None):
    """The actions that a run of these failures meets, one after another, each recorded as a supervisor would."""
    history, actions = list(history), []
    for name in names:
        if name.startswith("step "):
            history.append({"event": "checkpoint", "step": int(name.removeprefix("step "))})
            continue
        decision = decide(verdict_of(name, name), history, policy, remedy=(remedies or {}).get(name))
        actions.append(decision.action)
        if decision.action not in ("retry", "retry_edited"):
            break
        history.append({"event": policy.record, **decision.as_record()})
    return actions


@pytest.mark.parametrize("name", sorted(name for name, known in CLASSES.items() if known.kind == "user"))
def test_a_user_error_is_not_tried_again(name):
    native = name in ("illegal_memory_access", "segfault")  # once: the GPU or a race may have been at fault
    assert run_into([name] * 2) == (["retry", "give_up"] if native else ["give_up"])


def test_budgets():
    assert run_into(["node_lost", "gpu_hardware", "dns", "node_lost"]) == ["retry"] * 3 + ["give_up"]
    assert run_into(["preempted"] * 50) == ["retry"] * 50
    assert run_into(["host_oom", "node_lost", "host_oom"]) == ["retry", "retry", "give_up"]
    assert run_into(["node_lost", "preempted"] * 3 + ["node_lost"])[-1] == "give_up"
    assert run_into(["cuda_oom"]) == ["give_up"]
    assert run_into(["time_limit"] * 4) == ["retry"] * 3 + ["give_up"]
    assert run_into(["time_limit"], replace(POLICY, after_limits=False)) == ["give_up"]
    assert run_into(["cuda_oom"] * 3, remedies={"cuda_oom": EDIT}) == ["retry_edited"] * 2 + ["give_up"]
    mixed = ["node_lost", "cuda_oom", "node_lost", "cuda_oom", "node_lost", "cuda_oom"]
    assert run_into(mixed, remedies={"cuda_oom": EDIT}) == [
        "retry", "retry_edited", "retry", "retry_edited", "retry", "give_up"
    ]  # fmt: skip


def test_only_a_newer_checkpoint_fills_budgets_up():
    lost = ["node_lost"] * 3
    assert run_into([*lost, "step 5", *lost, "step 5", "node_lost"])[-1] == "give_up"
    assert run_into([*lost, "step 5", *lost, "step 6", "node_lost"])[-1] == "retry"
    in_place = [{"event": "launched", "job": "a"}, *({"event": "restart", "class": "dns"} for _ in range(3))]
    assert run_into(["dns"], history=in_place) == ["give_up"]
    assert run_into(["dns"], history=[*in_place, {"event": "launched", "job": "b"}]) == ["retry"]
    assert run_into(["dns"], replace(POLICY, record="retry"), history=in_place) == ["retry"]  # a level of its own


def test_a_hang_excludes_a_node_that_is_named_twice_and_no_other():
    """A deadlock of the program names a node too, and then another one."""

    def after(*hosts):
        history = []
        for host in hosts:
            decision = decide(verdict_of("hang", "rank 1 is behind", host=host), history, Policy(restarts=9))
            history.append({"event": "restart", **decision.as_record()})
        return decision.exclude_nodes

    assert after("node7") == ()
    assert after("node7", "node7") == ("node7",)
    assert after("node7", "node8") == ()
    assert after("node7", "node8", "node8") == ()
    assert after("node7", "node7", "node8") == (), "without the one it went on: the program is at fault"


def test_a_hang_does_not_count_against_the_node_of_who_reports_it():
    line = "PeerLostError: rank 1 on sick-1 hangs: no step for 15 s"
    suspects = {
        rank: decide(verdict_of("hang", line, rank=rank, host=f"node{rank}"), [], POLICY).suspects for rank in (0, 1)
    }
    assert suspects == {0: (), 1: ("node1",)}


def test_a_job_that_a_decision_submitted_has_no_budget_of_its_own():
    """Restarts in place and new jobs add up; they do not multiply."""
    killed, policy = verdict_of("node_lost", "gone"), Policy(restarts=2)

    def restarts(*between, **launched):
        history = [{"event": "launched", "job": "a"}, {"event": "restart", "class": "node_lost"}] * 2
        return decide(killed, [*history, *between, {"event": "launched", "job": "b", **launched}], policy).action

    retry = {"event": "retry", "class": "node_lost"}
    assert restarts() == "retry", "a person started it again"
    assert restarts(retry) == "give_up"
    assert restarts(retried=True) == "give_up", "as pods are told, which do not see the client's records"
    assert restarts({**retry, "edit": {"train.micro_batch": [2, 1]}}) == "retry", "another run"
    assert restarts(retry, {"event": "checkpoint", "step": 7}) == "retry", "progress"


def test_backoff_doubles_and_sick_nodes_are_excluded():
    history = []
    waits = []
    for _ in range(3):
        decision = decide(verdict_of("gpu_hardware", "Xid 79", host="node7"), history, Policy(3, record="retry"))
        history.append({"event": "retry", **decision.as_record()})
        waits.append(decision.backoff_seconds)
    assert waits == [1.0, 2.0, 4.0]
    assert excluded(history) == ["node7"]
    assert decide(verdict_of("dns", "no name", host="node7"), [], POLICY).exclude_nodes == ()


@pytest.mark.parametrize(
    ("name", "waited", "action"),
    [
        ("gpu_unavailable", 1e6, "wait"),
        ("queue_wait", 1e6, "wait"),
        ("quota", 1e6, "wait"),
        ("job_held", 1e6, "wait"),
        ("cpu_memory_request", 1e6, "wait"),  # by nodes in use: where none could ever take it there is a remedy
        ("config_missing", 10.0, "wait"),
        ("config_missing", 700.0, "give_up"),
        ("image_missing", 700.0, "give_up"),
    ],
)
def test_a_job_that_waits(name, waited, action):
    assert decide(verdict_of(name, "evidence"), [], POLICY, waited=waited).action == action


def test_a_guess_is_a_kill_by_nobody_knows_whom():
    guess = verdict_of("host_oom", "rank 1 was killed by SIGKILL", confidence=0.4)
    history = []
    for left in (2, 1, 0):
        decision = decide(guess, history, POLICY)
        assert (decision.action, decision.name, decision.left) == ("retry", "unknown", left)
        history.append({"event": "restart", **decision.as_record()})
    assert decide(guess, history, POLICY).action == "give_up"
    assert decide(verdict_of("user_code", "perhaps", confidence=0.4), [], POLICY).action == "give_up"


@given(st.lists(st.sampled_from(sorted(CLASSES)), max_size=40))
def test_without_progress_everything_but_preemption_ends(names):
    actions = run_into([name for name in names if name not in FREE])
    assert len(actions) <= 3 + 4 + 1  # the infrastructure's, and once each for the four that are tried once
