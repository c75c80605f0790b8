"""Why a job does not start: the scheduler, queues, quotas and what refuses it."""

from __future__ import annotations

import re

from windlass.diagnose.facts import Facts
from windlass.diagnose.rules.shapes import refusal, slurm, start

RULES = (
    # What the API or a controller answers when objects are made.
    refusal("clock_skew", r"x509: certificate has expired or is not yet valid: current time \S+ is before"
            r"|RequestTimeTooSkewed|clock skew"),
    refusal("api_credentials", r"x509: certificate has expired|certificate has expired"),
    refusal("clock_skew", r"Rewound credential|credential expired|out of sync clocks"),
    refusal("config_missing", r"(?:serviceaccount|service account|secret|configmap)s? \S+ not found"
            r"|serviceaccount .{0,80}not found"),
    refusal("operator_missing", r"no matches for kind|could not find the requested resource"
            r"|resource mapping not found|ensure CRDs are installed"
            r"|the server doesn't have a resource type|\(404\).*page not found"),
    refusal("schema_mismatch", r"strict decoding error|unknown field|conversion webhook .* failed|unable to decode"
            r"|error validating data"
            r"|field is immutable|unrecognized type|no kind .* is registered"),
    refusal("quota", r"exceeded quota|must specify (limits|requests|cpu|memory)\S*|(maximum"
            r"|minimum) \S+ usage per (Container|Pod)|failed quota"),
    refusal("admission_denied", r"violates PodSecurity|denied the request|(kyverno|gatekeeper|policy"
            r"|constraint).{0,200}(denied|blocked|violat|refus)"
            r"|blocked due to the following policies|ValidatingAdmissionPolicy"
            r"|unable to validate against any security context constraint"),
    refusal("api_unreachable", r"failed calling webhook.{0,300}(deadline exceeded|timeout|timed out|refused"
            r"|no endpoints|EOF)|(?:dial tcp|net/http).{0,200}(?:timeout|refused|no route)"
            r"|TLS handshake timeout|Unable to connect to the server|etcdserver|the server is currently unable"
            r"|(?:connection to the server .* was refused)"
            r"|Unable to contact slurm controller|Socket timed out on send/recv|slurm_load_jobs error"
            r"|Gateway Time-?out|context deadline exceeded|ServiceUnavailable"
            r"|read timed out|i/o timeout|http2: client connection lost|connection reset by peer|too many requests"
            r"|persistent connection|the server was unable to return a response in the time allotted"),
    refusal("api_credentials", r"Unauthorized|\(401\)|ExpiredToken|token (?:has |is )?expired"
            r"|the server has asked for the client to provide credentials|InvalidClientTokenId"
            r"|must be logged in|Invalid account or account/partition|Invalid account|invalid user"
            r"|security token included in the request is (expired|invalid)|getting credentials: exec"
            r"|certificate signed by unknown authority|exec plugin|current-context is not set"
            r"|no configuration has been provided|Protocol authentication error|Invalid authentication credential"
            r"|not permitted to use this partition|SSO session .* expired|user.{0,40}not in.{0,40}association"
            r"|AccountNotAllowed"),
    refusal("api_forbidden", r"is forbidden: User|cannot (create|get|list|watch|delete|patch|update"
            r"|impersonate) resource|\(403\)|Forbidden|Access/permission denied|not authorized to perform"
            r"|User .* cannot"),
    refusal("queue_never", r"Requested node configuration is not available|invalid partition"
            r"|Requested time limit is invalid|violates accounting/QOS policy|QOSMax\w+"
            r"|Requested partition configuration"
            r"|Node count specification invalid|More processors requested than permitted|Invalid qos"
            r"|Invalid feature|Invalid generic resource|AssocMax\w+|ExceedsMaxQuota|NoMatchingFlavor"
            r"|couldn't assign flavors.{0,300}(?:> maximum capacity|not available in the ClusterQueue|no matching)"
            r"|exceeds? (?:the )?max(?:imum)? (?:quota|capacity)|Memory specification can not be satisfied"
            r"|request > maximum capacity|LocalQueue \S+ doesn't exist|ClusterQueue \S+ (?:doesn't exist|not found"
            r"|is inactive)"),
    refusal("volume_unbound", r"persistentvolumeclaim \S+ not found"),
    refusal("user_arguments", r"does not look like a batch script|Invalid directive|no PriorityClass with name"
            r"|Batch script contains DOS line breaks|does not start with #!|unrecognized option"
            r"|Invalid numeric value|Unable to open file|invalid option|Batch job submission failed: I/O error writing"
            r"|(?:metadata\.name|spec\.\S+): (?:Invalid value|Required value|Unsupported value)|is invalid: "
            r"|error parsing \S+: |error converting YAML"),
    refusal("cloud_capacity", r"InsufficientInstanceCapacity|do not have sufficient capacity"
            r"|ZONE_RESOURCE_POOL_EXHAUSTED|InsufficientHostCapacity|SkuNotAvailable|UnfulfillableCapacity"
            r"|MaxSpotInstanceCountExceeded"
            r"|insufficient capacity|AllocationFailed|stockout"),
    refusal("queue_wait", r"couldn't assign flavors|insufficient unused quota|waiting for quota|QuotaReserved"
            r"|WaitingForQuota|TopologyPlacementFailed|Pending in queue|not enough resources|minMember"
            r"|Waiting for (?:all )?pods"
            r"|is not ready|Suspended by|JobSuspended|gated", confidence=0.75),
    # Events and waiting reasons of pods that have no node yet; FailedScheduling itself is taken apart below.
    start("cloud_capacity", r"FailedScaleUp|NotTriggerScaleUp|InsufficientCapacityError|FailedScheduling|Failed\w*"
            r"|LaunchFailed|NodeClaim\w*",
          r"InsufficientInstanceCapacity|sufficient capacity|insufficient capacity|ZONE_RESOURCE_POOL_EXHAUSTED"
          r"|stockout|UnfulfillableCapacity|out of resource|SkuNotAvailable|GCE_STOCKOUT"),
    start("queue_wait", r"SchedulingGated|Suspended|Pending|NotInqueue"
            r"|Unschedulable", r"gate|queue|quota|pod ?group|minMember|gang", confidence=0.8),
    # Slurm's reasons of jobs that wait.
    slurm("job_held", r"PENDING.*|CONFIGURING.*|REQUEUE_HOLD.*"
            r"|SPECIAL_EXIT.*", r"JobHeld|DependencyNeverSatisfied|JobHoldMaxRequeue|requeued held|held state"),
    slurm("api_credentials", r"PENDING.*|FAILED.*", r"InvalidAccount|AccountNotAllowed"
            r"|Account.{0,20}not (?:permitted|allowed)|not permitted to use this partition|UserNotAllowed"),
    slurm("queue_never", r"PENDING.*|FAILED.*", r"PartitionNodeLimit|PartitionTimeLimit|PartitionInactive"
            r"|PartitionConfig|BadConstraints|InvalidQOS|QOSNotAllowed|\w+PerJob(?:Limit)?\b|WallDuration"
          r"|ReservationDeleted|Max(?:Node|CPU|GRES|TRES|Mem)\w*PerJob|MaxMemPerLimit|QOSJobLimit|QOSMinGRES"
          r"|QOSUsageThreshold|QOSMinCpu"),
    slurm("user_arguments", r"FAILED.*", r"RaisedSignal:53\b", confidence=0.6),
    slurm("queue_wait", r"PENDING.*|CONFIGURING.*|SUSPENDED.*", None, confidence=0.85),
)  # fmt: skip

NOISE_TAINTS = re.compile(r"node-role\.kubernetes\.io|control-plane|node\.cloudprovider\.kubernetes\.io/uninitialized")
GPU_NAME = re.compile(r"(?:nvidia\.com|amd\.com|gpu\.intel\.com)/(?:gpu|mig)\S*")
PARTS = (
    ("volume_unbound", r"unbound immediate PersistentVolumeClaim|persistentvolumeclaim \S+ (?:not found"
            r"|is being deleted)|volume node affinity conflict|exceed max volume count|bound to non-existent"),
    ("gpu", r"Insufficient (?:nvidia\.com|amd\.com)/\S+"),
    ("efa_unavailable", r"Insufficient vpc\.amazonaws\.com/efa|Insufficient (?:rdma|hca)\S*|Insufficient \S*(?:rdma"
            r"|infiniband|mellanox)\S*"),
    ("cpu_memory_request", r"Insufficient (?:cpu|memory|ephemeral-storage|hugepages\S*)"),
    ("pod_limit", r"Too many pods"),
    ("node_affinity", r"didn't match (?:Pod's )?(?:node )?(?:affinity|selector|node selector)"
            r"|didn't match PersistentVolume's node affinity|didn't match pod (?:anti-)?affinity"
            r"|didn't satisfy existing pods anti-affinity|topology spread"),
    ("taint", r"untolerated taint|had taint"),
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
        one
        for one in facts.nodes
        if any(GPU_NAME.fullmatch(key) and amount not in ("", "0") for key, amount in one.allocatable.items())
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
        all_tainted = gpu_nodes and all(one.taints for one in gpu_nodes)
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
    order = ("efa_unavailable", "cpu_memory_request", "pod_limit")
    for name in order:
        if name in reasons:
            return name, 0.9 if len(reasons) == 1 else 0.75
    rest = sorted(reasons, key=lambda name: -reasons[name])
    return (rest[0], 0.9 if len(rest) == 1 else 0.65) if rest else None
