"""Why a job does not start: the scheduler, queues, quotas and what refuses it."""

from __future__ import annotations

import re

from windlass.diagnose.facts import Facts
from windlass.diagnose.rules.shapes import line, refusal, slurm, start

NO_MACHINES = r"""
    Insufficient(?:Instance|Host)?Capacity|do not have sufficient|sufficient \S+ capacity|insufficient capacity
    stockout|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|UnfulfillableCapacity|MaxSpotInstanceCountExceeded
    out of resource|AllocationFailed|OverconstrainedAllocation|enough resources available to fulfill
    Unable to provision requested ML|ReservationCapacityExceeded|GCE out of resources|no capacity available
    CapacityError|FleetCapacity"""
ACCOUNT_LIMIT = r"""
    VcpuLimitExceeded|vCPU (?:capacity|limit)|InstanceLimitExceeded|ResourceLimitExceeded|account-level service limit
    QUOTA_EXCEEDED|Quota '\S+' exceeded|exceeding approved|QuotaExceeded"""

RULES = (
    # What the API or a controller answers when objects are made.
    refusal("clock_skew", r"""
        x509: certificate has expired or is not yet valid: current time \S+ is before|RequestTimeTooSkewed|clock skew
        Rewound credential|credential expired|out of sync clocks|not yet valid"""),
    refusal("api_credentials", r"certificate has expired"),
    refusal("config_missing", r"""
        (?:serviceaccount|service account|secret|configmap|TrainingRuntime\S*)s? \S+ (?:was )?not found
        serviceaccount .{0,80}not found"""),
    refusal("quota", ACCOUNT_LIMIT),
    refusal("operator_missing", r"""
        no matches for kind|could not find the requested resource|resource mapping not found|ensure CRDs are installed
        the server doesn't have a resource type|\(404\).*page not found|404 page not found|failed to find API group"""),
    refusal("schema_mismatch", r"""
        strict decoding error|unknown field|conversion webhook .* failed|unable to decode|error validating data
        field is immutable|unrecognized type|no kind .* is registered|json: cannot unmarshal|unsupported API version
        does not match the expected API version"""),
    refusal("quota", r"""
        exceeded quota|must specify (?:limits|requests|cpu|memory)|(?:maximum|minimum) \S+ usage per (?:Container|Pod)
        failed quota|LimitRange|insufficient quota to match these scopes"""),
    refusal("api_unreachable", r"""
        failed calling webhook.{0,300}(?:deadline exceeded|timeout|timed out|refused|no endpoints|EOF|no route|x509)
        """),
    refusal("admission_denied", r"""
        violates PodSecurity|denied the request|blocked due to the following policies|ValidatingAdmissionPolicy
        (?:kyverno|gatekeeper|policy|constraint).{0,200}(?:denied|blocked|violat|refus)|PodSecurityPolicy
        unable to validate against any security context constraint|unable to admit pod"""),
    refusal("api_unreachable", r"""
        (?:dial tcp|net/http).{0,200}(?:timeout|refused|no route|no such host)|TLS handshake timeout|etcdserver
        Unable to connect to the server|the server is currently unable|connection to the server .* was refused
        Unable to contact slurm controller|Socket timed out on send/recv|slurm_load_jobs error|Gateway Time-?out
        context deadline exceeded|ServiceUnavailable|read timed out|i/o timeout|http2: client connection lost
        connection reset by peer|too many requests|persistent connection|unable to return a response in the time
        Client\.Timeout exceeded|Zero Bytes were transmitted|Unable to establish connection to slurm
        slurmdbd.{0,60}down|Communication connection failure|unexpected EOF|Slurm temporarily unable to accept job"""),
    refusal("api_credentials", r"""
        Unauthorized|\(401\)|ExpiredToken|token (?:has |is )?expired|asked for the client to provide credentials
        InvalidClientTokenId|must be logged in|Invalid account|invalid user|getting credentials: exec|exec plugin
        security token included in the request is (?:expired|invalid)|certificate signed by unknown authority
        current-context is not set|no configuration has been provided|Protocol authentication error
        Invalid authentication credential|not permitted to use this partition|SSO session .* expired
        user.{0,40}not in.{0,40}association|AccountNotAllowed|Unable to locate credentials|Invalid user id"""),
    refusal("api_forbidden", r"""
        is forbidden: User|cannot (?:create|get|list|watch|delete|patch|update|impersonate) resource|\(403\)
        Access/permission denied|not authorized to perform|User .* cannot|AccessDeniedException|Forbidden"""),
    refusal("cloud_capacity", NO_MACHINES),
    refusal("queue_never", r"""
        Requested node configuration is not available|invalid partition|Requested time limit is invalid|Invalid qos
        violates accounting/QOS policy|QOSMax\w+|Requested partition configuration|Node count specification invalid
        More processors requested than permitted|Invalid feature|Invalid generic resource|AssocMax\w+|ExceedsMaxQuota
        NoMatchingFlavor|exceeds? (?:the )?max(?:imum)? (?:quota|capacity)|Memory specification can not be satisfied
        > maximum capacity|(?:Local|Cluster)Queue \S+ (?:doesn't exist|not found|is inactive)|Invalid constraint
        resource \S+ unavailable in ClusterQueue|(?:untolerated taint|doesn't match node affinity).{0,80}flavor
        flavor .{0,80}(?:untolerated taint|doesn't match node affinity|not found)|doesn't match ClusterQueue selector
        couldn't assign flavors.{0,300}(?:not available in the ClusterQueue|no matching)|Invalid reservation
        Requested reservation is invalid|requests exceed limits|Node count .{0,40}exceed|does not support Topology
        Requested GRES|Unable to satisfy|CPU count per node can not be satisfied|limit exceeds partition"""),
    refusal("volume_unbound", r"persistentvolumeclaim \S+ not found"),
    refusal("user_arguments", r"""
        does not look like a batch script|Invalid directive|no PriorityClass with name|is invalid: |invalid option
        Batch script contains DOS line breaks|does not start with #!|This does not look like|unrecognized option
        Invalid numeric value|Unable to open file|submission failed: I/O error writing|Invalid job array specification
        (?:metadata\.name|spec\.\S+): (?:Invalid value|Required value|Unsupported value|Duplicate value|Forbidden)
        error parsing \S+: |error converting YAML|the path \S+ does not exist|Invalid dependency|Invalid --\w+"""),
    refusal("job_held", r"""
        workload is deactivated(?! due)|^Deactivated\b|ClusterQueueStopped|LocalQueueStopped|is stopped""",
            confidence=0.7),
    refusal("queue_wait", r"""
        couldn't assign flavors|insufficient unused quota|waiting for quota|QuotaReserved|WaitingForQuota
        TopologyPlacementFailed|Pending in queue|not enough resources|minMember|Waiting for (?:all )?pods|is not ready
        Suspended by|JobSuspended|gated|in gang unschedulable|queue resource quota insufficient|PendingEvaluation
        WaitingForPreempted|Waiting for admission|Admission check|pod group is not ready""", confidence=0.75),
    line("queue_never", r"""
        srun: error: Unable to (?:create step|allocate resources).{0,80}(?:Requested node conf|Invalid|More processors)
        srun: error: Unable to (?:create step|allocate resources).{0,80}Memory required by task is not available"""),
    line("cloud_capacity", r"""
        (?:ERROR: )?.{0,80}(?:ZONE_RESOURCE_POOL_EXHAUSTED|enough resources available to fulfill)"""),
    # Events and waiting reasons of pods that have no node yet; FailedScheduling itself is taken apart below.
    start("quota", None, ACCOUNT_LIMIT),
    start("cloud_capacity", r"""
        FailedScaleUp|NotTriggerScaleUp|InsufficientCapacityError|FailedScheduling|Failed\w*|LaunchFailed|NodeClaim\w*
        Launched|Registered|TerminatingOnError""", NO_MACHINES, confidence=0.95),
    start("queue_wait", r"SchedulingGated|Suspended|Pending|NotInqueue|Unschedulable|PodGroupPending", r"""
        gate|queue|quota|pod ?group|minMember|gang|minAvailable""", confidence=0.8),
    # Slurm's reasons of jobs that wait.
    slurm("job_held", r"PENDING|CONFIGURING|REQUEUE_HOLD|SPECIAL_EXIT|SUSPENDED", r"""
        JobHeld|DependencyNeverSatisfied|JobHoldMaxRequeue|requeued held|held state|launch failed requeued"""),
    slurm("job_held", r"REQUEUE_HOLD|SPECIAL_EXIT", confidence=0.8),
    slurm("api_credentials", r"PENDING|FAILED", r"""
        InvalidAccount|AccountNotAllowed|Account.{0,20}not (?:permitted|allowed)|not permitted to use this partition
        UserNotAllowed|InvalidAssoc"""),
    slurm("queue_never", r"PENDING|FAILED", r"""
        PartitionNodeLimit|PartitionTimeLimit|PartitionInactive|PartitionConfig|BadConstraints|InvalidQOS
        QOSNotAllowed|\w+PerJob(?:Limit)?\b|WallDuration|ReservationDeleted|Max(?:Node|CPU|GRES|TRES|Mem)\w*PerJob
        MaxMemPerLimit|QOSJobLimit|QOSMin\w+|QOSUsageThreshold|\w+PerNode\b|NodeCountTooHigh|AssociationTimeLimit
        AssociationResourceLimit"""),
    slurm("node_lost", r"PENDING", r"""
        Nodes? required for job are DOWN|ReqNodeNotAvail,? ?UnavailableNodes""", confidence=0.6),
    slurm("user_arguments", r"FAILED", r"RaisedSignal:53\b", confidence=0.6),
    slurm("queue_wait", r"PENDING|CONFIGURING|SUSPENDED", confidence=0.85),
)  # fmt: skip

NOISE_TAINTS = re.compile(r"node-role\.kubernetes\.io|control-plane|node\.cloudprovider\.kubernetes\.io/uninitialized")
GPU_NAME = re.compile(r"(?:nvidia\.com|amd\.com|gpu\.intel\.com)/(?:gpu|mig)\S*")
PARTS = (
    ("volume_unbound", r"unbound immediate PersistentVolumeClaim|persistentvolumeclaim \S+ (?:not found"
            r"|is being deleted)|volume node affinity conflict|exceed max volume count|bound to non-existent"
            r"|find available persistent volumes to bind"),
    ("port_in_use", r"didn't have free ports"),
    ("gpu", r"Insufficient (?:nvidia\.com|amd\.com|habana\.ai|aws\.amazon\.com/neuron)\S*|cannot allocate all claims"),
    ("efa_unavailable", r"Insufficient vpc\.amazonaws\.com/efa|Insufficient (?:rdma|hca)\S*|Insufficient \S*(?:rdma"
            r"|infiniband|mellanox)\S*"),
    ("cpu_memory_request", r"Insufficient (?:cpu|memory|ephemeral-storage|hugepages\S*)"
            r"|no instance type.{0,40}resources"),
    ("pod_limit", r"Too many pods"),
    ("node_affinity", r"didn't match (?:Pod's )?(?:node )?(?:affinity|selector|node selector)"
            r"|didn't match PersistentVolume's node affinity|didn't match pod (?:anti-)?affinity"
            r"|didn't satisfy existing pods anti-affinity|topology spread|incompatible requirements"
            r"|does not have known values"),
    ("taint", r"untolerated taint|had taint|did not tolerate"),
    ("node_lost", r"were unschedulable|node\(s\) (?:were )?not ready"),
)  # fmt: skip


def explain_unschedulable(message: str, facts: Facts) -> tuple[str, float] | None:
    """The class of a FailedScheduling event: which of its reasons holds for the nodes that could have taken the pod."""
    reasons: dict[str, int] = {}
    taints = re.findall(r"(\d+) node\(s\) had (?:untolerated )?taints? \{([^}]*)\}", message)
    for name, pattern in PARTS:
        counted = [int(count[:9]) for count in re.findall(rf"(\d+) (?:node\(s\) )?(?:had )?(?:{pattern})", message)]
        if counted or re.search(pattern, message):
            reasons[name] = sum(counted) or 1
    noise = sum(int(count[:9]) for count, taint in taints if NOISE_TAINTS.search(taint))
    if taints and "taint" in reasons:
        reasons["taint"] = sum(int(count[:9]) for count, _ in taints) - noise
        if reasons["taint"] <= 0:
            del reasons["taint"]
    if re.search(r"pod group|minMember|gang|NotEnoughResources", message, re.IGNORECASE) and not reasons:
        return "queue_wait", 0.7
    if "volume_unbound" in reasons:
        return "volume_unbound", 0.9
    gpu_nodes = [
        node
        for node in facts.nodes
        if any(GPU_NAME.fullmatch(key) and amount not in ("", "0") for key, amount in node.allocatable.items())
    ]
    if "gpu" in reasons:
        if facts.nodes and not gpu_nodes:
            return "gpu_plugin_missing", 0.9
        gpu_taints = [
            taint
            for _, taint in taints
            if re.search(r"gpu|nvidia|accelerator|dedicated|hyperpod|sagemaker|health", taint, re.IGNORECASE)
        ]
        others = {name: count for name, count in reasons.items() if name not in ("gpu", "efa_unavailable")}
        all_tainted = gpu_nodes and all(node.taints for node in gpu_nodes)
        if "taint" in reasons and (
            (gpu_nodes and all_tainted) or (not facts.nodes and gpu_taints and reasons["taint"] >= reasons["gpu"])
        ):
            return "taint", 0.75
        if (
            "node_affinity" in others
            and gpu_nodes
            and others["node_affinity"] >= len(gpu_nodes)
            and reasons["gpu"] <= len(facts.nodes) - len(gpu_nodes)
        ):
            return "node_affinity", 0.75
        return "gpu_unavailable", 0.9 if not others else 0.75
    # what remains: reasons of single nodes, of which a shortage says more than a label or taint of the rest
    order = ("port_in_use", "efa_unavailable", "cpu_memory_request", "pod_limit")
    for name in order:
        if name in reasons:
            return name, 0.9 if len(reasons) == 1 else 0.75
    rest = sorted(reasons, key=lambda name: -reasons[name])
    return (rest[0], 0.9 if len(rest) == 1 else 0.65) if rest else None
