"""What the pods of a deep check found, judged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from windlass.clusters.deep.inside import SECONDS
from windlass.clusters.deep.pods import PodReport
from windlass.clusters.needs import EFA, Needs
from windlass.clusters.result import Result, failed, named, passed, warning

SLOW_LINK = 0.5  # of the median of all links
SLOW_DISK_MIB_S = 100.0
LARGE = 1 << 24  # bytes from which an all-reduce shows the network's speed and not its delay


def judge(reports: Sequence[PodReport], needs: Needs, line_rate_gbit_s: float | None) -> list[Result]:
    lines = [{**line, "node": pod.node} for pod in reports for line in pod.lines]
    return [
        *named("deep-pods", _ran(reports, needs)),
        *named("dns", _names(lines)),
        *named("links", _links(lines, reports, line_rate_gbit_s)),
        *named("all-reduce", _collectives(lines)),
        *named("network", _network(lines, needs)),
        *named("disk", _disks(lines)),
    ]


def _ran(reports: Sequence[PodReport], needs: Needs) -> Iterator[Result]:
    finished = [pod for pod in reports if any(line["check"] == "end" for line in pod.lines)]
    if len(finished) == needs.num_pods:
        nodes = len({pod.node for pod in finished})
        yield passed(f"{needs.num_pods} pods ran on {nodes} nodes")
    for pod in reports:
        if pod not in finished:
            yield failed(
                f"the pod {pod.pod} did not come to its end",
                evidence=f"{pod.node or 'no node'}: {pod.phase}; {pod.reason or 'its log ends early'}",
                fix="the checks above say what keeps it; kubectl get events",
            )
    if len(reports) < needs.num_pods:
        yield failed(f"{len(reports)} of {needs.num_pods} pods were made", "see the Job's events")


def _names(lines: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    asked = {(line["pod"], line["name"]): line for line in lines if line["check"] == "dns"}.values()  # the last word
    for line in asked:
        if "error" in line:
            yield failed(
                f"pod {line['pod']} on {line['node']} does not find {line['name']}",
                evidence=str(line["error"]),
                fix="kubectl -n kube-system get pods -l k8s-app=kube-dns",
            )
    found = [line["seconds"] for line in asked if "error" not in line]
    if asked and len(found) == len(asked):
        yield passed(f"all names were found, the last after {max(found):.1f} s")


def _links(
    lines: Sequence[Mapping[str, Any]], reports: Sequence[PodReport], line_rate: float | None
) -> Iterator[Result]:
    node_of = {pod.index: pod.node for pod in reports}
    broken = [line for line in lines if line["check"] in ("port", "link") and "error" in line]
    for line in broken:
        origin, goal = (line["pod"], line["to"]) if line["check"] == "port" else (line["origin"], line["pod"])
        yield failed(
            f"{node_of.get(origin, origin)} does not reach {node_of.get(goal, goal)}",
            evidence=str(line["error"]),
            fix="the security group or network policy must allow all traffic between nodes",
        )
    speeds = {
        (line["origin"], line["pod"]): float(line["gbit_s"])
        for line in lines
        if line["check"] == "link" and "error" not in line
    }
    if not speeds:
        return
    usual = median(speeds.values())
    slow = {ends: speed for ends, speed in speeds.items() if speed < SLOW_LINK * usual}
    if line_rate and usual < 0.05 * line_rate:  # one TCP stream never fills a fast network; a twentieth is no network
        yield warning(
            f"links carry {usual:.2f} Gbit/s, and the instance has {line_rate:g}",
            evidence=f"{len(speeds)} links, one TCP stream each",
        )
    for (origin, goal), speed in slow.items():
        yield warning(
            f"from {node_of.get(origin)} to {node_of.get(goal)} go {speed:.2f} Gbit/s, over other links {usual:.2f}",
            evidence=f"pods {origin} and {goal}, {SECONDS:g} s of one TCP stream",
            fix=f"kubectl cordon {node_of.get(goal)}    keeps runs off it",
        )
    if not slow and not broken:
        yield passed(f"{len(speeds)} links carry {min(speeds.values()):.2f} Gbit/s or more")


def _collectives(lines: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    tried = [line for line in lines if line["check"] == "collective"]
    for line in tried:
        if "error" in line:
            yield failed(f"all-reduce failed in pod {line['pod']} on {line['node']}", str(line["error"]))
        elif line["wrong"]:
            yield failed(
                f"all-reduce over {line['backend']} gave {line['wrong']} wrong numbers",
                evidence=f"{line['bytes']} bytes, {line['world']} ranks, seen in pod {line['pod']} on {line['node']}",
                fix="keep runs off this node and report it: wrong sums train nonsense",
            )
    if not tried:
        yield failed("no all-reduce was tried", "no pod came that far; the checks above say why")
    right = [line for line in tried if "error" not in line and not line["wrong"]]
    large = [line for line in right if line["bytes"] >= LARGE] or right  # over a slow network none was tried
    if large and len(right) == len(tried):
        best = max(float(line["gbit_s"]) for line in large)
        yield passed(f"all-reduce over {large[0]['backend']} is right on {large[0]['world']} ranks: {best:.2f} Gbit/s")


def _network(lines: Sequence[Mapping[str, Any]], needs: Needs) -> Iterator[Result]:
    """Whether NCCL itself says that EFA carries it."""
    used = sorted({network for line in lines if line["check"] == "network" for network in line["networks"]})
    asks_efa = needs.asks(EFA)
    if not used and not asks_efa:
        return
    # every rank: "AWS Libfabric" or "Libfabric", and where the plugin names its provider, efa
    is_efa = used and all("Libfabric" in network or network in ("OFI", "provider efa") for network in used)
    if asks_efa and not is_efa:
        yield failed(
            "NCCL does not use EFA, though the pods have it",
            evidence=f"NCCL's log: {', '.join(used) or 'it names no network'}",
            fix="an image with aws-ofi-nccl and libfabric: windlass image plan",
        )
    else:
        yield passed(f"NCCL uses {', '.join(used)}")


def _disks(lines: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    for line in lines:
        if line["check"] != "disk":
            continue
        if "error" in line:
            yield failed(f"{line['node']} cannot write to the checkpoint volume", str(line["error"]))
        elif line["write_mib_s"] < SLOW_DISK_MIB_S:
            yield warning(
                f"{line['node']} writes {line['write_mib_s']} MiB/s to the checkpoint volume",
                evidence=f"256 MiB with fsync; read back at {line['read_mib_s']} MiB/s",
                fix="a file system with more throughput, or checkpoint.store=s3://…",
            )
        else:
            yield passed(f"{line['node']} writes {line['write_mib_s']} MiB/s to the checkpoint volume")
