"""Libraries that do not fit together, drivers, and GPUs that fail."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, near, node, raised

CUDA = r"""
    RuntimeError|AcceleratorError|DistBackendError|CUDAError|CudaError|OSError|AssertionError|NVMLError\w*|Error
    CalledProcessError|InternalError|c10::\w+|CompilationError|LaunchError"""
# Of NVIDIA's table: a fault of the GPU, its memory or its links. 13, 31, 43, 45 come from applications.
XID = (
    r"(?:46|48|54|61|62|63|64|68|74|79|92|94|95|109|110|119|120|121|122|123|126|136|137|140|142|143|144|145|149|151"
    r"|154|155|156|157|158|160|168|171|172)\b"
)

RULES = (
    raised("driver_too_old", None, r"""
        driver version is insufficient|NVIDIA driver on your system is too old|Error 80[34]\b|driver is too old
        forward compatibility was attempted|unsupported display driver|cudaErrorInsufficientDriver
        unsupported toolchain|system driver mismatch|CUDA_ERROR_COMPAT_NOT_SUPPORTED|SYSTEM_DRIVER_MISMATCH
        please update your driver|not supported in the installed CUDA driver|minimum (?:required )?driver version"""),
    raised("library_clash", None, r"""
        undefined symbol|not compiled with CUDA enabled|doesn't have NCCL built in|Failed to find C compiler
        CUDA_HOME environment variable is not set|does not match the version torch was compiled|CUDA Setup failed
        cannot open shared object file|GLIBC(?:XX)?_[\d.]+.{0,20} not found|wrong ELF class|symbol lookup error
        version `\S+' not found|file too short|numpy\.dtype size changed|compiled using NumPy 1|_ARRAY_API not found
        compiled with (?:different )?CUDA|CUDA version .{0,60}mismatch|operator \w+::\S+ does not exist
        NCCL version mismatch|mismatched? (?:NCCL|CUDA|cuDNN) version|DLL load failed|different CUDA versions
        built (?:for|against|with) (?:a different|another|torch|PyTorch)|cuDNN version incompatibility
        compiled against|incompatible with (?:the )?(?:installed|current) (?:torch|PyTorch)
        numpy\.core\.multiarray failed|\bABI\b|Couldn't load custom C\+\+ ops|/nvcc'|'nvcc'|Ninja is required
        No CUDA runtime is found|libcu\w+\.so|libnccl\S*\.so|Installed CUDA version
        CUDA extension.{0,40}not (?:installed|built|available)|triton.{0,60}(?:version|incompatible)"""),
    raised("gpu_arch", CUDA + "|ValueError|NotImplementedError|ImportError", r"""
        no kernel image is available|sm_\d+ is not (?:compatible|supported)|not compatible with the current PyTorch
        FlashAttention only supports|only supports? (?:Ampere|Hopper|Ada|compute capability)|kernel image is invalid
        requires? (?:device with|compute|a GPU with|SM) ?capability|Unsupported gpu arch|compute capability
        not supported on (?:this )?(?:GPU|device|compute)|Value '?sm_\d+\w*'? is not defined for option 'gpu-name'
        doesn't support bf16|bf16.{0,60}not supported|does not support bfloat16|only supported on GPUs with"""),
    raised("gpu_hardware", CUDA, r"""
        uncorrectable (?:ECC|NVLink)|ECC error|ECC_UNCORRECTABLE|cudaErrorECC|fallen off the bus|GPU is lost
        GPU requires reset|GPU has been reset|row remap|hardware stack error|\bXid\b|CUDA error: unknown error
        ERROR_GPU_IS_LOST|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|busy or unavailable|NVLink|NVLS
        remapped row|GPU \S+ is (?:dead|unhealthy)|NVML_ERROR_(?:UNKNOWN|RESET_REQUIRED)"""),
    raised("device_assert", CUDA, r"device-side assert triggered|cudaErrorAssert"),
    raised("illegal_memory_access", CUDA, r"""
        illegal memory access|misaligned address|illegal instruction was|invalid program counter
        cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|warp illegal|illegal address""", confidence=0.8),
    raised("illegal_memory_access", CUDA, r"""
        unspecified launch failure|CU(?:BLAS|DNN|FFT|SOLVER)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)
        CUDA_ERROR_LAUNCH_FAILED""", confidence=0.6),
    raised("gpu_count", CUDA + "|ValueError", r"""
        invalid device ordinal|device >= 0 && device < num_gpus|device index .{0,60}(?:out of range|larger|must)
        local.?rank.{0,60}(?:exceed|greater|larger|>=).{0,60}(?:GPU|device)|nproc_per_node.{0,80}(?:GPU|device)
        only \d+ (?:GPUs?|devices?)|Invalid device id|not enough (?:GPUs|devices)
        Requested GPUs?.{0,60}(?:not|available)|requested gpu: .{0,60}But your machine only has
        Attempting to deserialize object on CUDA device"""),
    raised("gpu_runtime", CUDA, r"""
        Found no NVIDIA driver|NVML: Driver|Driver/library version mismatch|Failed to initialize NVML|nvidia-container
        Driver Not Loaded|NVML Shared Library Not Found|libnvidia-ml|CUDA_ERROR_NOT_INITIALIZED|initialization error
        could not select device driver""", confidence=0.8),
    raised("gpu_runtime", CUDA, r"""
        No CUDA GPUs are available|no CUDA-capable device|No visible GPU devices
        initialize backend '(?:cuda|gpu|rocm)'|CUDA is not available|cuda unavailable
        torch\.cuda\.is_available\(\) is False""", confidence=0.55),
    line("library_clash", r"""
        (?:\S+: )?(?:symbol lookup error|error while loading shared libraries): |\S+: symbol lookup error
        \S+: \S+: (?:undefined symbol|version `\S+' not found)|Could not load library libcu
        \S{0,120}\bld: cannot find -l|collect2: error: ld returned"""),
    line("device_assert", r"\S{0,300}:\d+: .{0,300}block: \[\d+,\d+,\d+\], thread: .{0,40}Assertion .{0,300} failed"),
    line("gpu_hardware", rf"""
        (?:\[[ \d.]+\]\s*)?NVRM: Xid \(.{{0,60}}\): {XID}|Unable to determine the device handle for GPU
        GPU \d+ is lost|.{{0,80}}GPU has fallen off the bus|.{{0,60}}uncorrectable (?:ECC|NVLink) error
        .{{0,40}}GPU is lost""", confidence=0.9),
    near("driver_too_old", "gpu_runtime gpu_count user_code user_arguments unknown library_clash", r"""
        NVIDIA driver on your system is too old|driver version is insufficient|forward compatibility was attempted
        Error 80[34]:"""),
    near("gpu_arch", "user_code illegal_memory_access unknown", r"with CUDA capability sm_\d+ is not compatible"),
    near("device_assert", "illegal_memory_access user_code segfault nccl_network collective_timeout echo unknown",
         r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion"),
    node("gpu_hardware", rf"""
        Xid[^\d]{{0,80}}(?:\(PCI:[^)]*\): )?{XID}|fallen off the bus|GPU is lost|uncorrectable (?:ECC|NVLink)
        GpuUnhealthy|row.?remap.{{0,40}}fail|ECCError|DoubleBitEcc|ThermalViolation|HW Slowdown|Nvlink|SxidError
        GPUHasFallen|Thermal ?(?:Watch|violation|shutdown)|GpuXidCriticalError|GpuDcgm\w*Fail
        deep-health-check.{{0,40}}Fail|node-health-status.{{0,40}}Unschedulable
        Gpu(?:Mem|Pcie|Power|Sm|Inforom|Nvswitch|Xid|Nvlink)\w*(?:Watch|Error|Fatal)
        SysLogs(?:S?XIDError|GPUFallenOff)|AcceleratedHardwareReady=False
        nvsentinel-state=(?:quarantined|draining|remediat)|GpuNeedsReset|RmInitAdapter failed"""),
)  # fmt: skip
