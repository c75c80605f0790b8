"""What one pod asks of its node: GPUs, EFA, huge pages, memory, CPUs. From the catalogue, or from the nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from windlass.catalog.instances import Instance, instance
from windlass.common.quantities import parse_quantity
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.manifests.capacity import tolerates
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, NodeFacts
from windlass.targets.protocol import with_ranks

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
HUGE_PAGES_OF_EFA = 5120  # MiB; libfabric's usual take
GIB = 2**30
INSTANCE_LABEL, OS_LABEL = "node.kubernetes.io/instance-type", "kubernetes.io/os"
# A node's own daemons and the agents of its cluster have to live beside the pod.
SHARE_OF_NODE = 0.93
SHARE_OF_RAM, RAM_KEPT_GIB = 0.88, 3  # of a machine's RAM, of which the kubelet already keeps some back


@dataclass(frozen=True)
class NodeShape:
    """What a pod gets; None where nothing is asked for."""

    gpus: int = 0
    efa: int = 0
    cpus: float | None = None
    memory_gib: float | None = None
    whole_node: bool = False
    huge_pages: bool = False  # for EFA, where the nodes have them: a pod that asks for what no node has waits for ever
    instance: Instance | None = None
    missing: str | None = None  # why it is not known what the nodes have
    gpu_resource: str = GPU
    devices: Mapping[str, int] = field(default_factory=dict)  # further ones, by name


def settle(run: Run, cluster: ClusterFacts) -> Run:
    """The run with its ranks counted: one per GPU of a node, or CPU processes."""
    requested = run.resources
    num_gpus = requested.gpus_per_node
    if num_gpus is None:
        num_gpus = instance(requested.instance).gpus if requested.instance else _gpus_there(run, cluster)
        if requested.processes_per_node and num_gpus:
            num_gpus = min(num_gpus, requested.processes_per_node)
    num_ranks = num_gpus or requested.processes_per_node or 1
    return with_ranks(run, num_gpus, requested.threads_per_process or max(1, _cpus_there(run, cluster) // num_ranks))


def _gpus_there(run: Run, cluster: ClusterFacts) -> int:
    """The most GPUs that a node for this run has. A cluster without any is no reason to train on CPUs unasked."""
    nodes = nodes_for(run, cluster.nodes)
    most = max((int(_amount(node, run.target.kubernetes.gpu_resource)) for node in nodes), default=0)
    if most:
        return most
    selector = run.target.kubernetes.node_selector
    if not cluster.nodes:
        cause = "the cluster's nodes were not listed (--offline, or it is not allowed), and the run file does not say"
    elif not nodes:
        labels = ", ".join(f"{key}={value}" for key, value in selector.items())
        cause = "no node that is ready takes such pods" + (f": none has the labels {labels}" if labels else "")
        cause += "; a pool that is scaled to zero has none until a pod asks for one"
    else:
        cause = f"none of the {len(nodes)} nodes that take such pods has any; a GPU pool may be scaled to zero"
    raise UserError(
        "it is not known how many GPUs the nodes have",
        cause=cause,
        fix="resources.gpus_per_node=8    (0 trains on the CPU), or resources.instance=TYPE",
    )


def shape_of(run: Run, cluster: ClusterFacts) -> NodeShape:
    """What a pod of a settled run asks for."""
    options, num_gpus = run.target.kubernetes, run.resources.gpus_per_node or 0
    machine = instance(run.resources.instance) if run.resources.instance else None
    if machine and num_gpus > machine.gpus:
        raise UserError(
            f"{machine.type} has {machine.gpus} GPUs, not {num_gpus}", fix=f"resources.gpus_per_node={machine.gpus}"
        )
    if "/mig-" in options.gpu_resource and num_gpus > 1:
        raise UserError(
            f"a pod cannot train on {num_gpus} {options.gpu_resource}",
            cause="CUDA shows a process the first part of a divided GPU alone",
            fix="resources.gpus_per_node=1    with resources.nodes pods",
        )
    nodes = nodes_for(run, cluster.nodes)
    usable = [node for node in nodes if _amount(node, options.gpu_resource) >= num_gpus]
    offered = _of_instance(machine, num_gpus) if machine else _of_nodes(nodes, usable, num_gpus, options.gpu_resource)
    if not num_gpus:
        cpus = float((run.resources.threads_per_process or 1) * (run.resources.processes_per_node or 1))
        offered = NodeShape(cpus=min(cpus, offered.cpus) if offered.cpus else cpus, instance=machine)
    efa = offered.efa if options.efa is None else options.efa
    if machine and machine.efa is not None and efa > machine.efa:
        raise UserError(
            f"{machine.type} has {machine.efa} EFA interfaces, not {efa}",
            cause="a pod that asks for more waits for ever",
            fix=f"target.kubernetes.efa={machine.efa}",
        )
    huge_pages = bool(efa and usable) and all(_amount(node, HUGE_PAGES) >= HUGE_PAGES_OF_EFA * 2**20 for node in usable)
    memory = offered.memory_gib
    if huge_pages and memory is not None:
        memory -= HUGE_PAGES_OF_EFA / 1024
    return NodeShape(
        gpus=num_gpus,
        efa=efa,
        cpus=parse_quantity(options.cpu) if options.cpu else offered.cpus,
        memory_gib=parse_quantity(options.memory) / GIB if options.memory else memory,
        whole_node=offered.whole_node,
        huge_pages=huge_pages,
        instance=machine,
        missing=offered.missing,
        gpu_resource=options.gpu_resource,
        devices=options.devices,
    )


def requests_of(shape: NodeShape) -> dict[str, str]:
    """As a container writes them. The scheduler needs requests; devices and memory are limits too."""
    amounts: dict[str, str] = {}
    if shape.cpus is not None:
        amounts["cpu"] = f"{shape.cpus:g}" if shape.cpus >= 1 else f"{math.ceil(shape.cpus * 1000)}m"
    if shape.memory_gib is not None:
        amounts["memory"] = f"{max(1, int(shape.memory_gib * 1024))}Mi"
    if shape.gpus:
        amounts[shape.gpu_resource] = str(shape.gpus)
    if shape.efa:
        amounts[EFA] = str(shape.efa)
    amounts |= {name: str(amount) for name, amount in shape.devices.items()}
    if shape.huge_pages:
        amounts[HUGE_PAGES] = f"{HUGE_PAGES_OF_EFA}Mi"
    return amounts


def limits_of(shape: NodeShape) -> dict[str, str]:
    """No limit on CPUs: throttled ranks would slow down all the others."""
    return {name: amount for name, amount in requests_of(shape).items() if name != "cpu"}


def instance_label(run: Run, cluster: ClusterFacts) -> str | None:
    """The instance type as the nodes spell it: HyperPod's begin with `ml.`, EC2's do not."""
    instance_type = run.resources.instance
    if instance_type is None:
        return None
    labelled = {node.labels.get(INSTANCE_LABEL) for node in cluster.nodes}
    plain = _plain(instance_type)
    spelled = [name for name in (plain, f"ml.{plain}") if name in labelled]
    return spelled[0] if spelled else instance_type


def _of_instance(machine: Instance, num_gpus: int) -> NodeShape:
    whole = num_gpus == machine.gpus
    share = num_gpus / machine.gpus if num_gpus else 1.0
    return NodeShape(
        efa=(machine.efa or 0) if whole else 0,  # part of a node gets none: its neighbour may need them
        cpus=max(1, math.floor((machine.vcpus * 0.97 - 0.5) * share)),
        memory_gib=max(1.0, (machine.ram_gib * SHARE_OF_RAM - RAM_KEPT_GIB) * share),
        whole_node=whole,
    )


def _of_nodes(nodes: Sequence[NodeFacts], usable: Sequence[NodeFacts], num_gpus: int, gpu_resource: str) -> NodeShape:
    """What the smallest node with enough GPUs, which are the usable ones, can give."""
    if not nodes:  # offline, or they may not be listed
        return NodeShape(missing="what the nodes have is not known here")
    if not usable:
        return NodeShape(missing=f"no node is there that has {num_gpus} GPUs" if num_gpus else "no node is there")
    gpus_there = min(int(_amount(node, gpu_resource)) for node in usable)
    share = num_gpus / gpus_there if num_gpus else 1.0
    whole = bool(num_gpus) and num_gpus == gpus_there
    return NodeShape(
        efa=min(int(_amount(node, EFA)) for node in usable) if whole else 0,
        cpus=max(0.1, math.floor(min(_amount(node, "cpu") for node in usable) * SHARE_OF_NODE * share * 10) / 10),
        memory_gib=min(_amount(node, "memory") for node in usable) / GIB * SHARE_OF_NODE * share,
        whole_node=whole,
    )


def _cpus_there(run: Run, cluster: ClusterFacts) -> int:
    if run.resources.instance:
        return instance(run.resources.instance).vcpus
    amounts = [_amount(node, "cpu") for node in nodes_for(run, cluster.nodes)]
    return int(min(amounts) * SHARE_OF_NODE) if amounts else 1


def nodes_for(run: Run, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """The nodes that take the run's pods: ready, with the labels that are asked for, and no taint that they lack."""
    options = run.target.kubernetes
    selector = {**options.node_selector, **(options.pod.get("nodeSelector") or {})}
    gpus = {"key": gpu_taint(run), "operator": "Exists"}
    tolerated = [*options.tolerations, *(options.pod.get("tolerations") or ()), gpus]
    fitting = []
    for node in nodes:
        kept_off = any(
            taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerates(taint, tolerated)
            for taint in node.taints
        )
        labelled = all(node.labels.get(key) == value for key, value in selector.items() if value is not None)
        fits = labelled and not kept_off and _is_instance(run, node) and not is_windows(node)
        if node.ready and node.schedulable and fits:
            fitting.append(node)
    return fitting


def is_windows(node: NodeFacts) -> bool:
    return node.labels.get(OS_LABEL) == "windows"


def gpu_taint(run: Run) -> str:
    """The taint that keeps others off nodes with such GPUs: the same whether or not they are divided."""
    return f"{run.target.kubernetes.gpu_resource.partition('/')[0]}/gpu"


def _is_instance(run: Run, node: NodeFacts) -> bool:
    instance_type = run.resources.instance
    return instance_type is None or _plain(node.labels.get(INSTANCE_LABEL, "")) == _plain(instance_type)


def _plain(instance_type: str) -> str:
    return instance_type.strip().lower().removeprefix("ml.")


def _amount(node: NodeFacts, resource: str) -> float:
    return parse_quantity(node.allocatable.get(resource, "0"))
