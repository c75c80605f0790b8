"""What a pod is given: its number, the others and where they meet, in its environment; and the user's code."""

from __future__ import annotations

import fcntl
import hashlib
import io
import socket
import struct
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import UserError
from windlass.runfolder import RUNS_VARIABLE, RunFolder
from windlass.spec import Run, load_run
from windlass.targets.kubernetes.pod import interface as names

RUN_FILE_VARIABLE, CARRIED_VARIABLE, SCRATCH_VARIABLE = "WINDLASS_RUN_FILE", "WINDLASS_CARRIED", "WINDLASS_SCRATCH"
SIOCGIFADDR = 0x8915
# What operators tell torchrun and ranks; the entry says all of it itself.
OPERATORS_OWN = ("PET_", "MASTER_", "TORCHELASTIC_")
OPERATORS_NAMES = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"))
ARRIVAL_SECONDS = 180.0  # kubelets refresh mounted ConfigMaps once a minute or so
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """One pod of a run."""

    node: int
    nodes: int
    min_nodes: int
    ranks: int  # of this pod
    host: str
    port: int
    address: str  # of this pod
    pod: str
    submission: str
    token: str = field(repr=False)  # the secret of the submission: who knows it is a pod of it
    shared: bool  # one run folder for all pods
    run: Run
    run_file: Path
    carried: Path
    scratch: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.run)

    @property
    def is_host(self) -> bool:
        return self.node == 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        run_file, scratch, carried = paths_of(environment)
        run = load_run(run_file, saved=True)
        nodes = int(environment.get(names.NODES_VARIABLE) or run.resources.nodes)
        return cls(
            node=node_index(environment),
            nodes=nodes,
            min_nodes=int(environment.get(names.MIN_NODES_VARIABLE) or nodes),
            ranks=run.resources.processes_per_node or 1,
            host=environment.get(names.HOST_VARIABLE) or "localhost",
            port=int(environment.get(names.PORT_VARIABLE) or names.COORDINATOR_PORT),
            address=environment.get("WINDLASS_POD_IP") or "127.0.0.1",
            pod=environment.get("WINDLASS_POD") or socket.gethostname(),
            submission=environment.get(names.SUBMISSION_VARIABLE) or "",
            token=environment.get(names.TOKEN_VARIABLE) or "",
            shared=environment.get(names.SHARED_VARIABLE) == "1",
            run=run,
            run_file=run_file,
            carried=carried,
            scratch=scratch,
        )


def paths_of(environment: Mapping[str, str]) -> tuple[Path, Path, Path]:
    """The run file, a folder for what is temporary, and the folder with what the job carries."""
    run_file = environment.get(RUN_FILE_VARIABLE) or names.RUN_FILE
    scratch = environment.get(SCRATCH_VARIABLE) or names.SCRATCH
    return Path(run_file), Path(scratch), Path(environment.get(CARRIED_VARIABLE) or names.CARRIED)


def node_index(environment: Mapping[str, str]) -> int:
    """This pod's number: from the job's index, or from a PyTorchJob's replica (its master is node 0)."""
    index = environment.get(names.INDEX_VARIABLE) or environment.get("JOB_COMPLETION_INDEX")
    if index is None or not index.isdigit():
        raise UserError(
            "this pod does not know its number among the pods of the run",
            evidence=f"${names.INDEX_VARIABLE} is {index!r}",
            cause="it was not made by a job that windlass rendered",
        )
    has_master = "MASTER_ADDR" in environment or "PET_MASTER_ADDR" in environment
    return int(index) + (environment.get(names.ROLE_VARIABLE) == "worker" and has_master)


def launcher_environment(environment: Mapping[str, str], place: Place) -> dict[str, str]:
    """The environment of torchrun: without what an operator would have told it, and without the entry's secret."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in (*OPERATORS_NAMES, names.TOKEN_VARIABLE) and not name.startswith(OPERATORS_OWN)
    }
    kept.setdefault(RUNS_VARIABLE, names.RUNS)
    interface = interface_of(place.address)
    if interface and place.nodes > 1:
        kept.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes a name, and no list of exclusions
    return kept


def interface_of(address: str) -> str | None:
    """The network interface that holds an IPv4 or IPv6 address."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines() if Path("/proc/net/if_inet6").exists() else []
        return next((line.split()[5] for line in lines if line.split()[0] == packed), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class NotArrivedError(Exception):
    """The code that all pods are to run is not here."""


def code_digest(carried: Path) -> str | None:
    """The digest of the code that is mounted now; None where the run carries none."""
    try:
        return (carried / f"{names.CODE}.{names.DIGEST_KEY}").read_text().strip()
    except FileNotFoundError:
        return None


def unpack_code(carried: Path, scratch: Path, wanted: str | None, *, patience: float = ARRIVAL_SECONDS) -> Path | None:
    """The folder with the code whose digest is `wanted`, waiting for it to arrive; None where the run carries none."""
    if wanted is None:
        return None
    folder = scratch / f"{names.CODE}-{wanted[:12]}"
    if folder.is_dir():
        return folder
    deadline = time.monotonic() + patience
    while (archive := _archive(carried, wanted)) is None:
        if time.monotonic() > deadline:
            raise NotArrivedError(f"the code {wanted[:12]} has not arrived in {carried}")
        time.sleep(POLL_SECONDS)
    unfinished = folder.with_suffix(".new")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(unfinished, filter="data")
    unfinished.rename(folder)
    return folder


def _archive(carried: Path, wanted: str) -> bytes | None:
    """All parts, if they are those of the wanted archive: parts of two versions may be mixed for a moment."""
    try:
        archive = b"".join(path.read_bytes() for path in sorted(carried.glob(f"{names.CODE}.[0-9][0-9]")))
    except FileNotFoundError:
        return None
    return archive if hashlib.sha256(archive).hexdigest() == wanted else None
