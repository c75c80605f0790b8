"""Why a job waits or ended, in plain words: Slurm's reason codes and states as data."""

from __future__ import annotations

# Reasons of a job that waits and will start when others end or time passes.
WAITS = {
    "Priority": "other jobs go first",
    "Resources": "the nodes it needs are busy",
    "BeginTime": "its start time has not come; a requeued job waits about two minutes",
    "Dependency": "it waits for another job to end",
    "Licenses": "it waits for a licence",
    "Cleaning": "its last stay on the nodes is still being cleaned up",
    "Prolog": "the nodes are being prepared",
    "Reservation": "its reservation has not begun",
    "JobArrayTaskLimit": "as many elements of the array run as are allowed at once",
    "QOSGrpCpuLimit": "the cores of its quality of service are in use",
    "QOSGrpNodeLimit": "the nodes of its quality of service are in use",
    "QOSGrpGRES": "the GPUs of its quality of service are in use",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as its quality of service allows at once",
    "QOSMaxGRESPerUser": "you use as many GPUs as its quality of service allows at once",
    "QOSMaxNodePerUserLimit": "you use as many nodes as its quality of service allows at once",
    "AssocGrpCpuLimit": "the cores of its account are in use",
    "AssocGrpNodeLimit": "the nodes of its account are in use",
    "AssocGrpGRES": "the GPUs of its account are in use",
    "AssocMaxJobsLimit": "its account runs as many jobs as it may at once",
    "NodeDown": "a node it needs is down",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "launch failed requeued held": "Slurm could not start it and holds it",
    "None": "Slurm has not looked at it yet",
}

# Reasons of a job that will not start unless somebody changes something: what is wrong, and what changes it.
NEVER = {
    "JobHeldUser": ("it is held", "scontrol release {job}"),
    "JobHeldAdmin": ("an administrator holds it", "ask who runs the cluster; windlass stop {name} takes it back"),
    "PartitionNodeLimit": ("it asks for more nodes than its partition gives one job", "resources.nodes=…"),
    "PartitionTimeLimit": ("it asks for more time than its partition gives", "target.slurm.time=…"),
    "PartitionDown": ("its partition is down", "target.slurm.partition=…"),
    "PartitionInactive": ("its partition is closed", "target.slurm.partition=…"),
    "PartitionConfig": ("its partition does not have what it asks for", "target.slurm.partition=…"),
    "AccountNotAllowed": ("its account may not use the partition", "target.slurm.account=…"),
    "BadConstraints": ("no node can ever have what it asks for", "target.slurm.constraint=…"),
    "DependencyNeverSatisfied": ("it waits for a job that failed", "windlass stop {name}"),
    "InvalidAccount": ("its account does not exist or is not yours", "target.slurm.account=…"),
    "InvalidQOS": ("its quality of service does not exist or is not yours", "target.slurm.qos=…"),
    "QOSNotAllowed": ("its quality of service is not allowed there", "target.slurm.qos=…"),
    "QOSJobLimit": ("its quality of service allows no more jobs", "target.slurm.qos=…"),
    "QOSMaxWallDurationPerJobLimit": ("its quality of service gives less time", "target.slurm.time=…"),
    "QOSMaxNodePerJobLimit": ("its quality of service gives one job fewer nodes", "resources.nodes=…"),
    "QOSMaxGRESPerJob": ("its quality of service gives one job fewer GPUs", "resources.gpus_per_node=…"),
    "AssocMaxNodePerJobLimit": ("its account gives one job fewer nodes", "resources.nodes=…"),
    "AssocMaxWallDurationPerJobLimit": ("its account gives one job less time", "target.slurm.time=…"),
    "ReservationDeleted": ("its reservation is gone", "target.slurm.sbatch=[]"),
    "JobHoldMaxRequeue": ("it was requeued too often, and Slurm holds it", "scontrol release {job}"),
}
PHRASES = {"not permitted to use this partition": "AccountNotAllowed", "account not permitted": "AccountNotAllowed"}

# How a job ended, where the run itself could not write it down.
ENDS = {
    "CANCELLED": "cancelled in Slurm",
    "TIMEOUT": "it came to its time limit before a checkpoint was saved",
    "NODE_FAIL": "a node was lost and Slurm did not requeue it",
    "OUT_OF_MEMORY": "a node's memory limit was reached",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "it came to its deadline",
    "PREEMPTED": "a job that goes before took its nodes",
    "FAILED": "its script failed",
}


def explain(reason: str, *, job: str, name: str) -> str:
    """A reason of Slurm's for a person: what it means, what changes it, and the code itself to look up."""
    code = reason.split(",")[0].strip()
    for phrase, known in PHRASES.items():
        if phrase in reason:
            code = known
    if code in NEVER:
        what, fix = NEVER[code]
        return f"it cannot start: {what} ({reason}); {fix.format(job=job, name=name)}"
    if code in WAITS:
        return f"{WAITS[code]} ({reason})"
    return f"Slurm says: {reason}"
