"""Memory: of the host, of the GPU and shared; limits of files and processes."""

from __future__ import annotations

import re

from windlass.diagnose.rules.shapes import by_launcher, ended, line, node, raised, slurm

TORCH = r"""
    OutOfMemoryError|ResourceExhaustedError|RuntimeError|AcceleratorError|DistBackendError|CUDAError|CudaError
    XlaRuntimeError|InternalError|c10::\w+|std::\w+"""
CUDA_FULL = r"""
    ^(?:CUDA|HIP|XPU|MPS backend)\b.{0,20}out of memory|^(?:Triton Error \[CUDA\]: )?out of memory
    (?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'
    ^cuda runtime error \(2\)|^cudaMalloc(?:Async)? failed.{0,40}out of memory|CUDA_ERROR_OUT_OF_MEMORY
    ^(?:CUDA driver error|CUDA error|hip error).{0,6}out of memory|cudaErrorMemoryAllocation|^Allocation on device
    ^RESOURCE_EXHAUSTED.{0,400}(?:memory|alloc)|Failed to CUDA calloc|^OOM when allocating tensor
    No available memory for the cache blocks|^Free memory on device .{0,60} is less than desired"""
UNITS = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "bytes": 2**-30, "B": 2**-30, "TiB": 2**10, "GB": 1.0, "MB": 2**-10}
AMOUNT = r"([\d.]{1,20}) (KiB|MiB|GiB|TiB|bytes|GB|MB|B)\b"


def _gib(pattern: str, text: str) -> float | None:
    match = re.search(pattern.replace("AMOUNT", AMOUNT), text)
    try:
        return float(match[1]) * UNITS[match[2]] if match else None
    except ValueError:
        return None


def _has_other_process(text: str) -> bool:
    """Whether others hold so much of the GPU that it would have fitted without them."""
    tried = _gib(r"[Tt]ried to allocate AMOUNT", text)
    total = _gib(r"total capac\w+ of AMOUNT", text) or _gib(r"AMOUNT total capacity", text)
    if tried is None or total is None:
        return False
    allocated = _gib(r"AMOUNT (?:is allocated by PyTorch|already allocated|allowed)", text)
    allocated = allocated or _gib(r"allocated memory AMOUNT", text) or 0.0
    reserved = _gib(r"AMOUNT is reserved by PyTorch but", text)
    held = allocated + reserved if reserved is not None else _gib(r"AMOUNT reserved in total", text) or allocated
    mine = _gib(r"this process has AMOUNT", text)
    if not held and mine is None:  # what this process holds is not said
        return False
    amounts = re.findall(rf"Process \d+ has {AMOUNT} memory in use", text)
    others = sum(float(number) * UNITS[unit] for number, unit in amounts if number.count(".") < 2 and number != ".")
    if amounts and mine is None:  # in a container torch lists this process among the others
        others -= min(others, held)
    if not amounts:
        free = _gib(r"AMOUNT (?:is )?free", text)
        others = total - free - held - 1.5 if free is not None else 0.0  # 1.5: CUDA contexts and NCCL
    return others > max(2.0, 0.08 * total) and (mine or held) + tried <= total


def _is_fragmented(text: str) -> bool:
    """Whether what is reserved but not in use would have been enough."""
    tried = _gib(r"[Tt]ried to allocate AMOUNT", text)
    unused = _gib(r"AMOUNT is reserved by PyTorch but unallocated", text)
    if unused is None:
        reserved, allocated = _gib(r"AMOUNT reserved in total", text), _gib(r"AMOUNT already allocated", text)
        unused = reserved - allocated if reserved is not None and allocated is not None else None
    return tried is not None and unused is not None and unused >= max(tried, 1.0)


RULES = (
    raised("cuda_oom_other_process", TORCH, CUDA_FULL, test=_has_other_process),
    raised("cuda_oom_fragmentation", TORCH, CUDA_FULL, test=_is_fragmented),
    raised("cuda_oom", TORCH + "|ValueError", CUDA_FULL, confidence=0.95),
    raised("host_oom", r"ray\.(?:\w+\.)*OutOfMemoryError|java\.lang\.OutOfMemoryError"),
    raised("cuda_oom", r"(?:torch\.(?:cuda\.)?)?OutOfMemoryError", confidence=0.95),
    raised("shm", None, r"""
        ^DataLoader worker .{0,60}killed by signal: Bus error|insufficient shared memory|out of shared memory
        ^unable to (?:open|resize|mmap).{0,60}(?:object|file) </torch_.{0,200}(?:No space left|Cannot allocate|ENOSPC)
        Error while creating shared memory segment|^\[Errno (?:28|12)\].{0,120}/dev/shm
        unable to write to file </torch_|unable to allocate shared memory\(shm\)
        shared memory \(shm\).{0,60}(?:small|insufficient|full|exhausted)"""),
    raised("too_many_files", None, r"""
        ^\[Errno 2[34]\]|Too many open files|received 0 items of ancdata|^can't start new thread|\bEMFILE\b
        ^\[Errno 11\] Resource temporarily unavailable|pthread_create failed|libgomp: Thread creation failed
        ^Resource temporarily unavailable|os error 24|number of file watchers|inotify|ulimit -[nu]"""),
    raised("host_oom", None, r"""
        ^DataLoader worker .{0,60}killed by signal: Killed|DefaultCPUAllocator: (?:can't|not enough)
        ^\[Errno 12\] Cannot allocate memory|^std::bad_alloc|CUDA error: host memory|cudaErrorHostMemory
        (?:node|worker|task|actor).{0,80}running low on memory|killed .{0,60}(?:by the )?OOM|memory pressure \(OOM\)
        """),
    raised("host_oom", r"_?(?:Array)?MemoryError|(?:std::)?bad_alloc", confidence=0.85),
    raised("host_oom", None, r"^DataLoader worker \(pid.{0,40}exited unexpectedly", confidence=0.5),
    raised("segfault", None, r"^DataLoader worker .{0,60}killed by signal: (?:Segmentation|Aborted)"),
    line("shm", r"""
        (?:ERROR: )?Unexpected bus error|Bus error(?: \(core dumped\))?$|Fatal Python error: Bus error
        (?:\S{0,120}: )?line \d+: +\d+ Bus error|srun: error: \S+: tasks?.{0,60}: Bus error|.{0,60}Signal: Bus error
        """, confidence=0.75),
    line("shm", by_launcher("7", "SIGBUS"), confidence=0.75),
    line("host_oom", r"""
        (?:slurmstepd|srun)\S*: error: .{0,120}(?:oom[-_ ]?kill|Out Of Memory|exceeded (?:job |step )?memory)
        (?:slurmstepd\S*: error: )?.{0,40}Exceeded (?:job|step) memory limit|oom-kill:|.{0,80}invoked oom-killer
        (?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process|.{0,120}OOM Killed
        .{0,60}killed due to (?:the node running low on memory|memory pressure)""", confidence=0.95),
    line("host_oom", r"""
        Killed$|(?:\S{0,120}: )?line \d+: +\d+ Killed\b|terminate called after throwing an instance of 'std::bad_alloc'
        """, confidence=0.6),
    line("host_oom", by_launcher("9", "SIGKILL"), confidence=0.5),
    line("too_many_files", r"""
        OpenBLAS blas_thread_init: pthread_create failed|libgomp: Thread creation failed
        \S+: fork: (?:retry: )?Resource temporarily unavailable|.{0,80}fork failed: Resource temporarily"""),
    ended("host_oom", r"OOMKilled(?: .*)?", confidence=0.95),
    ended("evicted_disk", r"Evict\w*", r"ephemeral|disk|storage|inodes|imagefs|nodefs|DiskPressure|emptyDir"),
    ended("evicted_memory", r"Evict\w*", r"low on resource: memory|MemoryPressure|memory"),
    ended("evicted_disk", r"(?:ContainerStatus)?Unknown|Error|", r"""
        The node was low on resource: (?:ephemeral|disk|inode)"""),
    node("host_oom", r"""
        (?:Memory cgroup out|Out) of memory: Kill(?:ed)? process \d+ \((?:python|pt_|torchrun|trainer)
        ^(?:OOMKilling|SystemOOM) .{0,200}(?:python|pt_main|torchrun|train)
        oom-kill:.{0,300}task=(?:python|pt_|torchrun|trainer)"""),
    slurm("host_oom", r"OUT_OF_ME", confidence=0.95),
)  # fmt: skip
