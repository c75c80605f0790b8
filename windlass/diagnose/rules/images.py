"""Images, volumes, configuration and the start of containers."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, pull, start

RULES = (
    pull("image_platform", r"no match(?:ing manifest)? for (?:platform|\S*linux/)|exec format error"
            r"|no matching manifest"),
    pull("clock_skew", r"x509: certificate has expired or is not yet valid: current time \S+ is before"),
    pull("image_rate_limit", r"toomanyrequests|rate ?limit|429 Too Many|(?:context )?deadline exceeded|i/o timeout"
            r"|TLS handshake timeout|connection (?:refused|reset)|no such host|unexpected EOF|503 Service|502 Bad"
            r"|500 Internal|no route to host"
         r"|context canceled|dial tcp|QPS exceeded|pull QPS|x509"),
    pull("image_auth", r"no basic auth credentials"),  # what containerd says of a registry that asked for a login
    pull("image_missing", r"authorization failed.{0,80}repository does not exist"
            r"|repository does not exist or may require|name unknown|manifest unknown|manifest for \S+ not found"
            r"|InvalidImageName|couldn't parse image|invalid reference format"
         r"|does not exist|is not present with pull policy|(?<!secret )not found", confidence=0.85),
    pull("image_auth", r"no basic auth|denied|unauthorized|401|403|forbidden|authentication required"
            r"|authorization (?:failed|token)|insufficient_scope|credentials"),
    pull("disk_full", r"no space left on device"),
    pull("image_missing", None, reasons=r"InvalidImageName|ErrImageNeverPull"),
    # volumes
    start("volume_unbound", r"FailedAttachVolume|FailedMount|FailedBinding|ProvisioningFailed|FailedScheduling"
            r"|WaitForFirstConsumer", r"Multi-Attach|claim .* not found|not bound|unbound|persistentvolumeclaim"
            r"|no persistent volumes available"
          r"|storageclass\S* \S+ not found|failed to provision volume|is already (?:used|attached)"
          r"|volume attachment is being deleted"),
    start("config_missing", r"FailedMount|CreateContainerConfigError|Failed"
            r"|CreateContainerError", r"(?:secret|configmap)s? \S+ not found|references non-existent (?:secret"
            r"|config) key|couldn't find key|object \S+/\S+ not registered|(?:secret|configmap) .{0,80}not found"),
    start("mount_failed", r"FailedMount|FailedAttachVolume|FailedMapVolume|VolumeFailed\w*"
            r"|CreateContainer(?:Config)?Error|Failed", r"mount|attach|volume|csi|hostPath|subPath|MGS"
            r"|permission denied", confidence=0.85),
    # network of the pod
    start("ip_exhausted", r"FailedCreatePodSandBox|NetworkNotReady"
            r"|FailedPodSandBoxStatus", r"assign an IP|no (?:available|free) (?:IP|addresses)|IPAM|CNI"
            r"|network plugin|failed to set ?up network|add network|InsufficientFreeAddresses|cni", confidence=0.85),
    # GPU by the runtime, and the container's own command
    start("gpu_runtime", r".*", r"nvidia-container-cli|failed to initialize NVML|Driver Not Loaded|nvml error"
            r"|libnvidia-ml|nvidia-container-runtime|could not select device driver"
            r"|UnexpectedAdmissionError.{0,200}nvidia|unresolvable CDI devices|no runtime for \"?nvidia"
          r"|Allocate failed due to .*(?:gpu|nvidia)"),
    start("image_platform", r".*", r"exec format error"),
    start("mount_failed", r"RunContainerError|CreateContainerError|StartError|ContainerCannotRun"
            r"|Failed", r"error mounting|failed to mount|mount \S+ to rootfs|hostPath type check"
            r"|not a directory: unknown"),
    start("container_start", r"RunContainerError|CreateContainerError|StartError|ContainerCannotRun"
            r"|PostStartHookError|CrashLoopBackOff|Failed|Error",
            r"executable file not found|no such file or directory|permission denied|chdir to cwd"
            r"|no command specified|not a directory|runAsNonRoot|run as non-root|has runAsNonRoot"
          r"|unable to start container process|failed to create (?:containerd|shim) task|exec: "),
    start("container_start", r"RunContainerError|StartError|ContainerCannotRun", confidence=0.7),
    start("config_missing", r"CreateContainerConfigError", confidence=0.8),
    start("ip_exhausted", r"FailedCreatePodSandBox", confidence=0.5),
    start("mount_failed", r"FailedMount|FailedAttachVolume", confidence=0.7),
    # the same where the container's process says it itself
    line("image_platform", r"(?:\S+: )?(?:exec )?\S{0,200}:? ?(?:cannot execute binary file: )?exec format error"),
    line("container_start", r"(?:\S+: ){0,3}(?:line \d+: )?(?:exec: )?\"?\S+\"?: (?:command not found|not found"
            r"|cannot execute|(?:Permission denied|No such file or directory)$)|(?:\S+: )?can't open file"
            r"|exec \S+: no such file|python\S*: can't open file|(?:slurmstepd"
            r"|srun): error: execve\(\): \S+: (?:No such file|Permission denied)"
         r"|slurmstepd: error: couldn't chdir", confidence=0.75),
    line("gpu_runtime", r"(?:slurmstepd: error: )?(?:pyxis|enroot)?.{0,40}nvidia-container-cli: "
            r"|Failed to initialize NVML: |NVIDIA-SMI has failed"),
    line("image_missing", r"(?:slurmstepd: error: )?(?:pyxis|enroot).{0,80}(?:manifest unknown|not found"
            r"|does not exist)"),
    line("image_auth", r"(?:slurmstepd: error: )?(?:pyxis|enroot).{0,80}(?:401|403|unauthorized|denied)"),
)  # fmt: skip
