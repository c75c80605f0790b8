"""How a job is ended from outside: limits, preemption, lost nodes, cancellation."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import ended, line, node, slurm

RULES = (
    ended("time_limit", r"DeadlineExceeded"),
    ended("time_limit", r".*", r"active longer than (?:the )?specified deadline"),
    ended("preempted", r"Preempt\w*|PreemptionByScheduler|PreemptionByKueueScheduler|TerminationByKubelet|Shutdown"
            r"|NodeShutdown|Terminated|SpotInterruption\w*|DeletionByTaintManager|EvictionByEvictionAPI|Drain\w*"
            r"|TaintManagerEviction|InterruptionNotice|RebalanceRecommendation",
          r"preempt|spot|reclaim|interrupt|shut ?down|drain|evict(?:ion)? API|maintenance|rebalance|higher.priority",
          confidence=0.9),
    ended("preempted", r"Preempted|Preempting|PreemptionByScheduler|PreemptionByKueueScheduler"
            r"|EvictedDueToPreempted|EvictedByPreemption|SpotInterruption\w*|Shutdown|NodeShutdown"
            r"|EvictionByEvictionAPI", confidence=0.85),
    ended("cancelled", r"ScalingReplicaSet|SuccessfulDelete|SuccessfulDeletePod"
            r"|SuccessfulRescale", r"[Ss]caled? down|[Dd]eleted? (?:pod|job)|to 0\b", confidence=0.7),
    ended("cancelled", r"Stopped", confidence=0.9),
    ended("node_affinity", r"NodeAffinity"),
    ended("gpu_unavailable", r"OutOf(?:nvidia|amd)\.com/gpu"),
    ended("cpu_memory_request", r"OutOf(?:cpu|memory|ephemeral-storage)"),
    ended("node_lost", r"NodeLost|NodeNotReady|DeletionByPodGC|DeletionByTaintManager"
            r"|TaintManagerEviction|Unknown|DeletingNode|RemovingNode|ContainerStatusUnknown", confidence=0.8),
    node("preempted", r"spot (?:instance )?(?:interruption|reclaim)|SpotInterruption|RebalanceRecommendation"
            r"|PreemptScheduled|aws-node-termination-handler|TerminateScheduled|maintenance event"
            r"|impending-node-termination|ToBeDeletedByClusterAutoscaler|DisruptionBlocked|karpenter\.sh/disrupt",
            confidence=0.85),
    node("node_lost", r"NodeNotReady|Ready=(?:Unknown|False)|Kubelet stopped posting|NodeHasInsufficient"
            r"|node\.kubernetes\.io/unreachable|node\.kubernetes\.io/not-ready", confidence=0.85),
    slurm("time_limit", r"TIMEOUT.*|DEADLINE.*", confidence=0.95),
    slurm("preempted", r"PREEMPTED.*", confidence=0.95),
    slurm("node_lost", r"NODE_FAIL.*|BOOT_FAIL.*", confidence=0.95),
    slurm("time_limit", r"CANCELLED.*", r"time ?limit|TimeLimit", confidence=0.85),
    slurm("preempted", r"CANCELLED.*", r"preempt", confidence=0.85),
    slurm("node_lost", r"(?:CANCELLED|FAILED|COMPLETING"
            r"|REQUEUED).*", r"NodeDown|NodeFail|node fail|Prolog|launch failed", confidence=0.8),
    slurm("preempted", r"REQUEUED.*", confidence=0.6),
    slurm("cancelled", r"CANCELLED.*|REVOKED.*", confidence=0.9),
    line("time_limit", r"slurmstepd: error: \*\*\* \w+ \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT"
            r"|srun: .{0,60}time limit|TERM_RUNLIMIT|.{0,60}walltime .{0,20}exceeded|.{0,80}DUE TO TIME LIMIT",
            confidence=0.95, strength=24),
    line("preempted", r"slurmstepd: error: \*\*\* \w+ \S+ ON \S+ CANCELLED AT \S+ DUE TO (?:PREEMPTION|JOB REQUEUE)"
            r"|.{0,80}this job is preempted|.{0,40}Spot (?:instance )?interruption notice|.{0,80}DUE TO PREEMPTION",
            confidence=0.95, strength=24),
    line("cancelled", r"\$ (?:kubectl delete|scancel|windlass stop)\b"
            r"|\S+ \"[\w.-]+\" (?:force )?deleted$", confidence=0.7, strength=13),
    line("clock_skew", r".{0,120}(?:Job credential expired|Rewound credential|check for out of sync clocks)"),
    line("node_lost", r"slurmstepd: error: \*\*\* \w+ \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE"
            r"|srun: error: Node failure on|.{0,80}DUE TO (?:NODE FAILURE|to SLURM_NODE)",
            confidence=0.95, strength=24),
)  # fmt: skip
