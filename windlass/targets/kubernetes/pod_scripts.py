"""Send small programs into pods and read their answers: use, network, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.api.execution import execute
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.pod.interface import RUNS
from windlass.targets.kubernetes.watch.archive import Filler
from windlass.targets.kubernetes.watch.pods import Pod, newest_by_node

AT_A_TIME = 16
T = TypeVar("T")


@cache
def source() -> str:
    return resources.files("windlass.targets.kubernetes.pod").joinpath("programs.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class PodScripts:
    """A pod, and the Python in it."""

    api: Api
    namespace: str
    pod: str
    container: str
    python: str

    def ask(self, task: str, *arguments: str, timeout: float = 60.0) -> Any:
        """The JSON that a task of programs.py answers with."""
        printed = self.read(task, *arguments, timeout=timeout)
        try:
            return json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError, RecursionError):
            raise self.failed(task, 0, printed or b"it printed nothing") from None

    def read(self, task: str, *arguments: str, timeout: float = 60.0) -> bytes:
        """What a task prints."""
        out = bytearray()
        self.stream(task, *arguments, to=out.extend, timeout=timeout)
        return bytes(out)

    def stream(self, task: str, *arguments: str, to: Callable[[bytes], object], timeout: float) -> None:
        """Hand what a task prints to `to`, as it comes."""
        complaints = bytearray()
        code = execute(
            self.api,
            self.namespace,
            self.pod,
            [self.python, "-c", source(), task, *arguments],
            container=self.container,
            stdout=to,
            stderr=complaints.extend,
            timeout=timeout,
        )
        if code != 0:
            raise self.failed(task, code, bytes(complaints))

    def failed(self, task: str, code: int, complaints: bytes) -> UserError:
        lines = complaints.decode(errors="replace").strip().splitlines()
        return UserError(
            f"{self.python} in {self.pod} could not do it ({task}, exit code {code})",
            evidence=lines[-1] if lines else None,
            fix="target.kubernetes.python=PATH    where the image's Python has another name",
            exit_code=ExitCode.FAILED,
        )


def of_each(
    scripts: Sequence[PodScripts], task: Callable[[PodScripts], T]
) -> Iterator[tuple[PodScripts, T | UserError]]:
    """The answer of every pod, some at a time; one that fails does not keep the others from answering."""

    def quietly(pod: PodScripts) -> T | UserError:
        try:
            return task(pod)
        except UserError as error:
            return error

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield from zip(scripts, pool.map(quietly, scripts), strict=True)


def filler(api: Api, job: ClusterJob, folder: RunFolder, pods: Callable[[], Sequence[Pod]]) -> Filler:
    """Reads parts of metrics.jsonl and history.jsonl in the run folder that the pods have, in one that runs."""
    python = folder.load_run().target.kubernetes.python

    def read(kind: str, begin: int, end: int) -> bytes:
        pod = newest_by_node(pods()).get(0)
        if pod is None or not pod.running:
            return b""
        scripts = PodScripts(api, job.namespace, pod.name, job.layout.container, python)
        try:
            return scripts.read("part", f"{RUNS}/{folder.load_run().name}/{kind}.jsonl", str(begin), str(end))
        except UserError:  # not everybody may exec; what the pods themselves say still comes
            return b""

    return read
