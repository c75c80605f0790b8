"""Images, volumes, configuration and the start of containers."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, pull, start

NOT_STARTED = r"""
    RunContainerError|CreateContainerError|StartError|ContainerCannotRun|PostStartHookError|CrashLoopBackOff|Failed
    Error"""
PYXIS = r"(?:slurmstepd\S*: error: )?(?:pyxis|enroot)"
DOCKER = r"(?:docker: )?Error response from daemon"
GPU_RUNTIME = r"""
    nvidia-container-cli|failed to initialize NVML|Driver Not Loaded|nvml error|libnvidia-ml|nvidia-container-runtime
    could not select device driver|UnexpectedAdmissionError.{0,200}nvidia|unresolvable CDI devices
    no runtime for "?nvidia|Allocate failed due to .*(?:gpu|nvidia)|nvidia-persistenced|failed to inject CDI devices
    RuntimeHandler "?nvidia"""

RULES = (
    pull("image_platform", r"""
        no match(?:ing manifest)? for (?:platform|\S*linux/)|exec format error|no matching manifest"""),
    pull("clock_skew", r"certificate has expired or is not yet valid: current time \S+ is before"),
    pull("disk_full", r"no space left on device"),
    pull("image_auth", r"no basic auth credentials"),  # what containerd says of a registry that asked for a login
    pull("image_rate_limit", r"""
        toomanyrequests|rate ?limit|429 Too Many|(?:context )?deadline exceeded|i/o timeout|TLS handshake timeout
        connection (?:refused|reset)|no such host|unexpected EOF|: EOF|50[0234] |no route to host|context canceled
        dial tcp|QPS exceeded|pull QPS|x509|RegistryUnavailable|HTTP response to HTTPS client|awaiting headers
        short read|Service Unavailable|failed to verify certificate|server misbehaving|network is unreachable"""),
    pull("image_missing", r"""
        authorization failed.{0,80}repository does not exist|repository does not exist or may require|name unknown
        manifest unknown|manifest for \S+ not found|InvalidImageName|couldn't parse image|invalid reference format
        does not exist|is not present with pull policy|(?<!secret )not found|invalid image name|NAME_UNKNOWN""",
        confidence=0.85),
    pull("image_auth", r"""
        no basic auth|denied|unauthorized|401|403|forbidden|authentication required|authorization (?:failed|token)
        insufficient_scope|credentials|not authorized to perform|oauth token|SignatureValidationFailed"""),
    pull("image_missing", None, reasons=r"InvalidImageName|ErrImageNeverPull"),
    pull("image_rate_limit", None, reasons=r"RegistryUnavailable"),
    # volumes
    start("volume_unbound", r"""
        FailedAttachVolume|FailedMount|FailedBinding|ProvisioningFailed|FailedScheduling|WaitForFirstConsumer
        ExternalProvisioning|VolumeBinding\w*""", r"""
        Multi-Attach|claim .* not found|not bound|unbound|persistentvolumeclaim|no persistent volumes available
        storageclass\S* \S+ not found|failed to provision volume|is already (?:used|attached)|no storage class is set
        volume attachment is being deleted|exclusively attached|waiting for a volume to be created"""),
    start("mount_failed", r"FailedMount", r"kube-root-ca\.crt", confidence=0.7),  # the cluster's own, not the user's
    start("config_missing", r"FailedMount|CreateContainerConfigError|Failed|CreateContainerError", r"""
        (?:secret|configmap)s? \S+ not found|references non-existent (?:secret|config) key|couldn't find key
        object \S+/\S+ not registered|(?:secret|configmap) .{0,80}not found"""),
    start("mount_failed", r"""
        FailedMount|FailedAttachVolume|FailedMapVolume|VolumeFailed\w*|CreateContainer(?:Config)?Error|Failed""", r"""
        mount|attach|volume|csi|hostPath|subPath|MGS""", confidence=0.85),
    start("container_start", r"CreateContainerConfigError|Failed", r"runAsNonRoot|run as non-root|runAsUser"),
    # network of the pod
    start("ip_exhausted", r"FailedCreatePodSandBox|NetworkNotReady|FailedPodSandBoxStatus|FailedToAssign\w*", r"""
        assign an? ?IP|no (?:available|free) (?:IP|addresses)|IPAM|CNI|network plugin
        failed to set ?up (?:pod )?network|add network|InsufficientFreeAddresses|range is full
        no IP addresses available|NetworkPluginNotReady""",
        confidence=0.85),
    # GPU by the runtime, and the container's own command
    start("driver_too_old", None, r"requirement error: unsatisfied condition|please update your driver"),
    start("gpu_runtime", None, GPU_RUNTIME),
    start("image_platform", None, r"exec format error"),
    start("mount_failed", NOT_STARTED, r"""
        error mounting|failed to mount|mount \S+ to rootfs|hostPath type check|not a directory: unknown
        bind source path"""),
    start("container_start", NOT_STARTED, r"""
        executable file not found|no such file or directory|permission denied|chdir to cwd|no command specified
        not a directory|unable to start container process|failed to create (?:containerd|shim) task|exec:"""),
    start("container_start", r"RunContainerError|StartError|ContainerCannotRun", confidence=0.7),
    start("config_missing", r"CreateContainerConfigError", confidence=0.8),
    start("ip_exhausted", r"FailedCreatePodSandBox", confidence=0.5),
    start("mount_failed", r"FailedMount|FailedAttachVolume", confidence=0.7),
    start("node_affinity", r"""
        FailedScheduling|FailedToSchedule|FailedSchedulingPod""", r"incompatible (?:with|requirements)",
          confidence=0.6),
    # the same where the container's process, docker or Slurm's container plugin says it
    line("image_platform", r"(?:\S+: )?(?:exec )?\S{0,200}:? ?(?:cannot execute binary file: )?exec format error"),
    line("driver_too_old", r".{0,400}nvidia-container-cli: requirement error: unsatisfied condition"),
    line("gpu_runtime", rf"""
        {DOCKER}.{{0,400}}(?:nvidia|could not select device driver)|NVIDIA-SMI has failed
        .{{0,80}}nvidia-container-cli: |{PYXIS}.{{0,60}}Command not found: nvidia-container-cli
        Failed to initialize NVML: |No devices were found$"""),
    line("mount_failed", rf"""
        {PYXIS}.{{0,40}}enroot-mount: |container creation failed: .{{0,400}}while mounting (?!image )"""),
    line("container_start", rf"{PYXIS}.{{0,40}}enroot-\w+: |{PYXIS}: +mkdir: |container creation failed: "),
    line("image_missing", rf"""
        {PYXIS}.{{0,200}}(?:manifest unknown|not found|does not exist|404|No such)
        {DOCKER}.{{0,200}}(?:manifest (?:for|unknown)|repository does not exist)
        (?:.{{0,60}}: )?could not open image |: Image path .{{0,300}}doesn't exist"""),
    line("image_auth", rf"""
        {PYXIS}.{{0,200}}(?:401|403|unauthorized|(?<!permission )denied)|{DOCKER}.{{0,200}}(?:unauthorized|denied)"""),
    line("image_rate_limit", rf"""
        {PYXIS}.{{0,200}}(?:429|toomanyrequests|Could not resolve|timed out|error code: 50\d)
        {DOCKER}.{{0,200}}(?:toomanyrequests|timeout|TLS handshake)"""),
    line("container_start", r"""
        (?:slurmstepd\S*: error: )?(?:pyxis: couldn't start container|spank: required plugin spank_pyxis)
        "\S+": executable file not found in \$PATH|exec /\.singularity\.d/actions/\S+ failed
        (?:\S+: ){0,3}(?:line \d+: )?(?:exec: )?"?\S+"?: (?:command not found|not found|cannot execute)
        (?:\S+: ){0,3}(?:line \d+: )?(?:exec: )?"?\S+"?: (?:Permission denied|No such file or directory)$
        (?:\S+: )?can't open file|exec \S+: no such file|python\S*: can't open file|slurmstepd: error: couldn't chdir
        (?:slurmstepd|srun): error: execve\(\): \S+: (?:No such file|Permission denied)
        (?:docker: )?Error response from daemon.{0,300}executable file not found""", confidence=0.75),
)  # fmt: skip
