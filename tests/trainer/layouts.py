"""Train several runs one after the other in one process group: starting ranks is what takes time in a test."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forking import context
from tests.trainer.harness import Result, free_port
from windlass.runfolder import RunFolder


def train_all(root: Path, runs: dict[str, dict[str, Any]], *, ranks: int, timeout: float = 300) -> dict[str, Result]:
    """Every run, by its name, on the same processes; the first that fails ends them all."""
    for name, run in runs.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(run | {"name": name}))
    environment = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WINDLASS_RUNS": str(root / "runs"),
        "WINDLASS_CACHE": os.environ["WINDLASS_CACHE"],
        "OMP_NUM_THREADS": "1",
    }
    logs = [root / f"console-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_be_rank, args=(own, log, [root / f"{name}.yaml" for name in runs])))
        processes[-1].start()
    for process in processes:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
    codes = [process.exitcode or 0 for process in processes]
    output = "".join(log.read_text(errors="replace") for log in logs)
    return {name: Result(RunFolder(root / "runs" / name), codes, output) for name in runs}


Case = tuple[int, dict[str, Any]]  # the number of ranks, and the run


def trains(cases: Callable[..., Sequence[Case]]) -> Callable[..., Any]:
    """Marks a test that looks at runs which `Together` trains: `cases` makes them of the test's parameters."""

    def marked(test: Any) -> Any:
        test.cases = cases
        return test

    return marked


class Together:
    """The runs of all tests of a module, each with the others of its number of ranks, once the first is asked for."""

    def __init__(self, request: pytest.FixtureRequest, root: Path, *shared: Any) -> None:
        self.root, self.shared, self.rounds = root, shared, 0
        self.results: dict[tuple[int, str], Result] = {}
        self.waiting: dict[int, dict[str, dict[str, Any]]] = {}
        for item in request.session.items:
            if item.path == request.path and hasattr(getattr(item, "function", None), "cases"):
                for ranks, run in self.cases_of(item):
                    self.waiting.setdefault(ranks, {})[json.dumps(run, sort_keys=True)] = run

    def cases_of(self, item: Any) -> Sequence[Case]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        made: Sequence[Case] = item.function.cases(*self.shared, **parameters)
        return made

    def results_of(self, item: Any) -> list[Result]:
        """What the runs of one test came to. Where runs failed together, each test trains its own alone."""
        cases = [(ranks, json.dumps(run, sort_keys=True), run) for ranks, run in self.cases_of(item)]
        for ranks in dict.fromkeys(ranks for ranks, key, _ in cases if (ranks, key) not in self.results):
            trained = self.train(ranks, self.waiting.pop(ranks)) if ranks in self.waiting else {}
            if not trained or any(any(result.codes) for result in trained.values()):
                trained = self.train(ranks, {key: run for own, key, run in cases if own == ranks})
            self.results |= {(ranks, key): result for key, result in trained.items()}
        return [self.results[ranks, key] for ranks, key, _ in cases]

    def train(self, ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, Result]:
        root = self.root / f"round-{self.rounds}"
        root.mkdir(parents=True)
        self.rounds += 1
        named = {f"run-{number}": run for number, run in enumerate(runs.values())}
        return dict(zip(runs, train_all(root, named, ranks=ranks, timeout=900).values(), strict=True))


def _be_rank(environment: dict[str, str], log: Path, files: list[Path]) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    train_in_turn(files)
    sys.stdout.flush()
    os._exit(0)


def train_in_turn(files: list[Path]) -> None:
    """What one rank does, with its place among the others in the environment."""
    import torch
    import torch.distributed as dist

    from windlass.plan import check, resolve
    from windlass.spec import load_run
    from windlass.trainer.callbacks.preemption import Preemption
    from windlass.trainer.distributed.faults import Faults
    from windlass.trainer.distributed.peers import PeerWatch
    from windlass.trainer.distributed.ranks import join_ranks
    from windlass.trainer.loop import train
    from windlass.trainer.main import open_folder
    from windlass.trainer.preparation import prepare
    from windlass.trainer.state import Attempt

    ranks = None
    for file in files:
        run = resolve(load_run(str(file), []))
        check(run, int(os.environ["WORLD_SIZE"]))
        ranks = ranks or join_ranks(run)
        torch.use_deterministic_algorithms(ranks.device.type == "cpu")
        ours = dataclasses.replace(ranks, tensor=run.parallel.tensor, context=run.parallel.context)
        folder = RunFolder.of(run)
        prepared = prepare(run, ours)
        open_folder(folder, ours.rank)
        watch, faults = PeerWatch(), Faults(ours.rank, folder.logs)
        watch.begin(ours, limit_s=60, where=lambda faults=faults: faults.reached, on_lost=lambda _lost: os._exit(1))
        train(Attempt(run, prepared, folder, ours, faults, Preemption(), watch))
        dist.barrier(group=ours.host)
        watch.close()


if __name__ == "__main__":
    train_in_turn([Path(name) for name in sys.argv[1:]])
    os._exit(0)
