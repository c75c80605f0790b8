"""Libraries that do not fit together, drivers, and GPUs that fail."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, near, node, raised

CUDA = (
    r"(?:[\w:]+[.:])*(?:RuntimeError|AcceleratorError|DistBackendError|CUDAError|CudaError|OSError|AssertionError"
    r"|NVMLError\w*|Error|CalledProcessError|InternalError|c10::\w+|CompilationError"
    r"|LaunchError)"
)  # fmt: skip
# Of NVIDIA's table: a fault of the GPU, its memory or its links. 13, 31, 43, 45 come from applications.
XID_HARDWARE = (
    r"(?:46|48|54|61|62|63|64|68|74|79|92|94|95|110|119|120|123|136|137|140|143|145|149|151|154|155|156|158|168)"
)  # fmt: skip

RULES = (
    raised("library_clash", None, r"undefined symbol|not compiled with CUDA enabled|doesn't have NCCL built in"
            r"|CUDA_HOME environment variable is not set|Failed to find C compiler"
            r"|does not match the version torch was compiled|CUDA Setup failed|cannot open shared object file"
            r"|GLIBC(?:XX)?_[\d.]+.{0,20} not found|wrong ELF class"
            r"|symbol lookup error|version `\S+' not found|file too short"
            r"|numpy\.dtype size changed|compiled using NumPy 1|compiled with (?:different )?CUDA"
            r"|CUDA version .{0,60}mismatch|operator torchvision::|NCCL version mismatch|mismatched? (?:NCCL|CUDA"
            r"|cuDNN) version|_ARRAY_API not found|DLL load failed"
            r"|different CUDA versions|built (?:for|against|with) (?:a different|another|torch|PyTorch)"
            r"|incompatible with (?:the )?(?:installed|current) (?:torch|PyTorch)|cuDNN version incompatibility"
            r"|compiled against|numpy\.core\.multiarray failed|\bABI\b"),
    raised("driver_too_old", CUDA, r"driver version is insufficient|NVIDIA driver on your system is too old"
            r"|Error 80[34]|forward compatibility was attempted|unsupported display driver"
            r"|cudaErrorInsufficientDriver|unsupported toolchain|driver is too old|system driver mismatch"
            r"|CUDA_ERROR_COMPAT_NOT_SUPPORTED"),
    raised("gpu_arch", CUDA + r"|(?:\w+\.)*(?:ValueError"
            r"|NotImplementedError)", r"no kernel image is available|sm_\d+ is not (?:compatible|supported)"
            r"|not compatible with the current PyTorch|FlashAttention only supports|only supports? (?:Ampere|Hopper"
            r"|Ada|compute capability)|requires? (?:device with|compute) capability|Unsupported gpu arch"
            r"|not supported on (?:this )?(?:GPU|device|compute)|compute capability"
            r"|Value '?sm_\d+\w*'? is not defined for option 'gpu-name'"),
    raised("gpu_hardware", CUDA, r"uncorrectable (?:ECC|NVLink)|ECC error|cudaErrorECC|fallen off the bus|GPU is lost"
            r"|GPU requires reset|GPU has been reset|row remap|hardware stack error|\bXid\b"
            r"|CUDA error: unknown error|ERROR_GPU_IS_LOST|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY"
            r"|busy or unavailable|NVLink"),
    raised("device_assert", CUDA, r"device-side assert triggered|^CUDA error: device-side assert"),
    raised("illegal_memory_access", CUDA, r"illegal memory access|misaligned address|illegal instruction was"
            r"|invalid program counter", confidence=0.8),
    raised("illegal_memory_access", CUDA, r"unspecified launch failure|CUBLAS_STATUS_EXECUTION_FAILED"
            r"|CUDNN_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_INTERNAL_ERROR", confidence=0.5),
    raised("gpu_count", CUDA, r"invalid device ordinal|device >= 0 && device < num_gpus"
            r"|device index .{0,60}(?:out of range|larger|must)|local rank.{0,60}(?:exceed|greater|larger"
            r"|>=).{0,60}(?:GPU|device)|nproc_per_node.{0,80}(?:GPU|device)|only \d+ (?:GPUs?|devices?)"
            r"|Invalid device id|not enough (?:GPUs|devices)"),
    raised("gpu_runtime", CUDA, r"Found no NVIDIA driver|NVML: Driver|Driver/library version mismatch"
            r"|Failed to initialize NVML|nvidia-container|Driver Not Loaded|NVML Shared Library Not Found"
            r"|libnvidia-ml|CUDA_ERROR_NOT_INITIALIZED|initialization error", confidence=0.8),
    raised("gpu_runtime", CUDA, r"No CUDA GPUs are available|no CUDA-capable device"
            r"|Torch not compiled with CUDA enabled|CUDA is not available|cuda unavailable", confidence=0.55),
    line("library_clash", r"(?:\S+: )?(?:symbol lookup error|error while loading shared libraries): "
            r"|\S+: \S+: (?:undefined symbol|version `\S+' not found)|\S+: symbol lookup error"),
    line("device_assert", r"\S{0,300}:\d+: .{0,300}block: \[\d+,\d+,\d+\], thread: .{0,40}Assertion .{0,300}"
            r" failed", confidence=0.85),
    line("gpu_hardware", r"(?:\[[ \d.]+\]\s*)?NVRM: Xid \(.{0,60}\):"
            r" " + XID_HARDWARE + r"\b|Unable to determine the device handle for GPU|GPU \d+ is lost"
            r"|.{0,80}GPU has fallen off the bus|.{0,60}uncorrectable (?:ECC|NVLink) error", confidence=0.9),
    near("driver_too_old", "gpu_runtime gpu_count user_code user_arguments"
            " unknown", r"NVIDIA driver on your system is too old|driver version is insufficient"
            r"|forward compatibility was attempted|Error 80[34]: "),
    near("gpu_arch", "user_code illegal_memory_access", r"with CUDA capability sm_\d+ is not compatible"),
    near("device_assert", "illegal_memory_access user_code segfault nccl_network collective_timeout"
            " echo", r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion"),
    node("gpu_hardware", r"Xid[^\d]{0,80}(?:\(PCI:[^)]*\): )?" + XID_HARDWARE +
            r"\b|fallen off the bus|GPU is lost|uncorrectable (?:ECC|NVLink)|GpuUnhealthy|NVLinkError"
            r"|row.?remap.{0,40}fail|ECCError|DoubleBitEcc|ThermalViolation|HW Slowdown|Nvlink|SxidError"
            r"|GPUHasFallen|ThermalWatch"
         r"|thermal (?:violation|shutdown)|GpuXidCriticalError"
         r"|sagemaker\.amazonaws\.com/node-health-status.{0,40}Unschedulable|deep-health-check.{0,40}[Ff]ail"
         r"|GpuDcgm\w*Fail"),
)  # fmt: skip
