"""How a job is ended from outside: limits, preemption, lost nodes, cancellation."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import ended, line, node, slurm

CANCELLED_AT = r"slurmstepd\S*: error: \*\*\* \w+ \S+ ON \S+ CANCELLED AT \S+ DUE [Tt][Oo] "

RULES = (
    ended("time_limit", r"""
        DeadlineExceeded|\w*MaximumExecutionTimeExceeded|DeadlineExceeded\w*|JobTimeout|TimeoutExceeded"""),
    ended("time_limit", None, r"active longer than (?:the )?specified deadline|exceeding the maximum execution time"),
    ended("preempted", r"""
        Preempt\w*|Evicted\w*|TerminationByKubelet|Shutdown|NodeShutdown|Terminated|SpotInterruption\w*
        DeletionByTaintManager|EvictionByEvictionAPI|Drain\w*|TaintManagerEviction|InterruptionNotice|Rebalance\w*
        Evict""", r"""
        preempt|spot|reclaim|interrupt|shut ?down|drain|evict(?:ion)? API|maintenance|rebalance|higher.priority
        fair sharing|Underutilized|Drifted|Consolidat|Evicted pod: Empty""", confidence=0.9),
    ended("preempted", r"""
        Preempted|Preempting|PreemptionBy\w+|EvictedDueToPreempted|EvictedByPreemption|SpotInterruption\w*|Shutdown
        NodeShutdown|EvictionByEvictionAPI|InCohort\w+|InClusterQueue""", confidence=0.85),
    ended("cancelled", r"ScalingReplicaSet|SuccessfulDelete|SuccessfulDeletePod|SuccessfulRescale", r"""
        scaled? down|deleted? (?:pod|job)|to 0\b""", confidence=0.7),
    ended("killed", None, r"started without `windlass run`; silent for \d+ min", confidence=0.6),  # nobody said stop
    ended("cancelled", r"Stopped|Cancelled|Canceled|JobCancelled|Aborted|UserCancelled", confidence=0.9),
    ended("node_affinity", r"NodeAffinity"),
    ended("gpu_unavailable", r"OutOf(?:nvidia|amd)\.com/gpu"),
    ended("cpu_memory_request", r"OutOf(?:cpu|memory|ephemeral-storage)"),
    ended("gpu_runtime", r"UnexpectedAdmissionError", r"gpu|nvidia|device"),
    ended("node_lost", r"""
        NodeLost|NodeNotReady|DeletionByPodGC|DeletionByTaintManager|TaintManagerEviction|Unknown|DeletingNode
        RemovingNode|ContainerStatusUnknown|NodeFailures?|EvictedDueToNodeFailures|NodeUnreachable""", confidence=0.8),
    ended("node_lost", None, r"the machine was restarted while it trained|has been silent for \d+ min", confidence=0.8),
    ended("disk_full", None, r"the disk of .{1,300} is full", confidence=0.9),
    ended("killed", None, r"its supervisor was killed", confidence=0.9),
    node("preempted", r"""
        spot (?:instance )?(?:interruption|reclaim)|SpotInterruption|Rebalance ?Recommendation|PreemptScheduled
        aws-node-termination-handler|TerminateScheduled|maintenance event|impending-node-termination|preempted
        ToBeDeletedByClusterAutoscaler|DisruptionBlocked|karpenter\.sh/disrupt|NodeShutdown|ScheduledEvent|ScaleDown
        """),
    node("node_lost", r"""
        NodeNotReady|\bReady=(?:Unknown|False)|Kubelet stopped posting|node\.kubernetes\.io/(?:unreachable|not-ready)
        (?:KernelReady|NetworkingReady|ContainerRuntimeReady)=False|KernelDeadlock|Rebooted|NodeStatusUnknown
        node\.cloudprovider\.kubernetes\.io/shutdown"""),
    slurm("time_limit", r"TIMEOUT|DEADLINE", confidence=0.95),
    slurm("preempted", r"PREEMPTED", confidence=0.95),
    slurm("node_lost", r"NODE_FAIL|BOOT_FAIL", confidence=0.95),
    slurm("time_limit", r"CANCELLED|FAILED|COMPLETING", r"time ?limit", confidence=0.85),
    slurm("preempted", r"CANCELLED|REQUEUED", r"preempt", confidence=0.85),
    slurm("node_lost", r"CANCELLED|FAILED|COMPLETING|REQUEUED", r"NodeDown|NodeFail|node fail|Prolog|launch failed",
          confidence=0.8),
    slurm("preempted", r"REQUEUED", confidence=0.6),
    slurm("cancelled", r"CANCELLED|REVOKED", confidence=0.9),
    line("time_limit", rf"""
        {CANCELLED_AT}TIME LIMIT|srun: .{{0,60}}time limit|TERM_RUNLIMIT|.{{0,60}}walltime .{{0,20}}exceeded
        .{{0,80}}DUE TO TIME LIMIT|=>> PBS: job killed: walltime""", confidence=0.95),
    line("preempted", rf"""
        {CANCELLED_AT}(?:PREEMPTION|JOB REQUEUE)|.{{0,80}}this job is preempted|.{{0,80}}DUE TO PREEMPTION
        .{{0,40}}Spot (?:instance )?interruption notice""", confidence=0.95),
    line("node_lost", rf"""
        {CANCELLED_AT}NODE FAILURE|srun: error: Node failure on
        srun: error: Task launch for \S+ failed on node \S+: (?!.{{0,40}}credential)
        slurmstepd: error: .{{0,120}}/sys/fs/cgroup/.{{0,200}}failed|slurmstepd: error: .{{0,60}}could not execve job
        .{{0,80}}DUE TO (?:NODE FAILURE|to SLURM_NODE)
        .{{0,80}}The node with node id: \S+ and address.{{0,200}}(?:dead|failed)""", confidence=0.95),
    line("cancelled", r"""
        \$ (?:kubectl delete|scancel|windlass stop)\b|\S+ "[\w.-]+" (?:force )?deleted$""", confidence=0.7),
    line("clock_skew", r".{0,120}(?:Job credential expired|Rewound credential|check for out of sync clocks)"),
)  # fmt: skip
