"""The network between ranks: NCCL, EFA, Gloo, rendezvous, names, ports; and what is only an echo."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, near, raised

DIST = r"""
    Dist\w*Error|RuntimeError|Connection\w*Error|TimeoutError|OSError|BrokenPipeError|Error|HorovodInternalError
    c10::\w+|(?:std::)?runtime_error|XlaRuntimeError|UnknownError|InternalError|gaierror|Exception|IoException
    NcclError|NCCLError"""
ANY_SOFT = "nccl_network rendezvous collective_timeout echo unknown"
BRACKETS = r"(?:\[[^\]]{1,80}\]:?\s*){0,4}"
# Requests to a hub or a store fail too, and are no matter of the ranks' network.
FOREIGN_HOST = ("huggingface", "hf.co", "amazonaws", "googleapis", "HTTPSConnectionPool", "HTTPConnectionPool", "http")


def _between_ranks(text: str) -> bool:
    return not any(host in text for host in FOREIGN_HOST)


RULES = (
    # Said by torch or NCCL, and never the fault of the network.
    raised("collective_mismatch", None, r"""
        mismatch between collectives|collectives? (?:mismatch|differ)|Mismatched? collective|ran different collectives
        desync.{0,100}(?:mismatch|different)|op\.preamble\.length <= op\.nbytes|Message truncated ?: rece
        DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param
        Rank \d+ is running .{0,400}but Rank \d+ is running|same (?:size|shape|dtype).{0,60}across (?:all )?ranks
        different number of (?:batches|steps|collectives)"""),
    raised("gpu_count", DIST, r"Duplicate GPU detected|multiple processes.{0,40}same GPU"),
    raised("user_arguments", DIST, r"mismatch in rank count|rank \d+ (?:is )?(?:out of range|>= world)"),
    raised("port_in_use", None, r"""
        EADDRINUSE|Address already in use|\[Errno 98\]|errno: 98|port \d+ (?:is )?already (?:in use|allocated)
        address in use|Only one usage of each socket address|Cannot find (?:a )?free port"""),
    raised("nccl_efa", DIST, r"""
        NET/OFI|libfabric|\bfi_[a-z_]{3,}|\bEFA\b|No eligible providers|aws-ofi|nccl_ofi|\befa_\w+|prov_errno
        Unable to register memory|unavailable event queue|Unresponsive receiver"""),
    raised("dns", DIST, r"""
        Name or service not known|Temporary failure in name resolution|No address associated with hostname
        nodename nor servname|gai error: -|getaddrinfo failed|Could not resolve host|cannot be retrieved \(gai
        no such host|server misbehaving|Unknown host|NXDOMAIN""", test=_between_ranks),
    # The watchdog and gloo's time-outs: somebody did not come.
    raised("collective_timeout", DIST, r"""
        Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out
        Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation|Application timeout caused pair closure
        monitoredBarrier.{0,200}(?:failed|timed out|timeout)|failed to pass monitoredBarrier
        Some NCCL operations have failed or timed out|NCCL timeout|collective.{0,40}timed? ?out
        Work\w*\(.{0,300}timed out|HeartbeatMonitor|watchdog.{0,60}(?:stuck|timeout)
        (?:all_?reduce|all_?gather|barrier|broadcast)\b.{0,60}timed? ?out|waiting for remainder of ranks
        """, confidence=0.85),
    raised("rendezvous", r"Rendezvous\w*Error"),
    raised("rendezvous", DIST, r"""
        client socket has (?:timed out|failed to connect)|Timed out after \d+ seconds waiting for clients
        clients joined|wait timeout after \d+ ?ms|Socket Timeout|failed to connect to (?:any network|TCPStore)
        rendezvous.{0,100}(?:time|closed|fail)|Store.{0,30}timed? ?out|store based barrier|waitForInput: poll
        timed out.{0,60}waiting for (?:workers|nodes|clients|all)|Timed out initializing process group
        coordination service.{0,120}(?:timed|deadline|unavailable)|Barrier timed out|C10d store has failed
        (?:connect|connection) to (?:the )?(?:GCS|head node|ray cluster).{0,60}(?:fail|timed)""", confidence=0.85),
    raised("cancelled", r"KeyboardInterrupt", confidence=0.6),
    raised("cancelled", r"SignalException", r"got signal: [12]\b", confidence=0.55),
    raised("node_lost", r"Ray\w*Error|\w+DiedError|ObjectLostError", r"""
        its node has died|node has crashed|node (?:was|is|has been marked) dead"""),
    # The run's own hang watch, which names who is behind.
    raised("hang", r"PeerLostError", r"rank \d+ on \S+ hangs: no step for"),
    # Echoes: another rank ended first.
    raised("echo", DIST, r"""
        remote process (?:has )?(?:exited|terminated)|ncclRemoteError|Connection (?:was )?(?:closed|reset) by
        closed by (?:remote )?peer|Broken pipe|communicator (?:was|has been) aborted|recvValue failed
        failed to recv, got 0 bytes|got 0 bytes|Connection reset|peer (?:has )?(?:closed|died|exited)
        Process group watchdog thread terminated|ncclCommAbort|another rank|was aborted on rank|Connection closed
        Stop_waiting response|TCPStore.{0,60}(?:down|shut)|Rank \d+ (?:is|has) (?:gone|failed|died)
        Socket recv failed while polling|(?:actor|worker) died unexpectedly|A remote rank""", confidence=0.4,
        test=_between_ranks),
    raised("host_oom", None, r"(?:terminated with signal SIGKILL|died with <Signals\.SIGKILL)", confidence=0.5),
    raised("segfault", None, r"""
        (?:terminated with signal|died with <Signals\.)\s?SIG(?:SEGV|ABRT|ILL|BUS)""", confidence=0.7),
    raised("echo", r"""
        ChildFailedError|SignalException|PeerLostError|ProcessExitedException|ProcessRaisedException|BrokenPipeError
        ConnectionResetError|CalledProcessError|EndSession|BrokenProcessPool|WorkerCrashedError|RayTaskError
        SystemExit|RayActorError|ActorDiedError|ActorUnavailableError|WorkerGroupError|TrainingFailedError
        WorkerGroupFailureError""", confidence=0.4),
    raised("nccl_network", DIST, r"""
        socketStartConnect|socketPollConnect|socketFinalizeConnect|Connection refused|Connection timed out
        No route to host|Network is unreachable|no socket interface found|no usable interface|ibv_\w+|IBV_|NET/IB
        connectFullMesh|ncclSystemError|unhandled system error|ncclInternalError|gloo/transport|gloo::
        makeDeviceForInterface|Unable to find (?:address|interface)|completion with error|Bootstrap :|bootstrap\w*Init
        retry counter exceeded|UCX.{0,60}(?:ERROR|timed? ?out|reset)|\bRoCE\b|\bInfiniBand\b|NET/Socket
        Software caused connection abort""", confidence=0.8, test=_between_ranks),
    raised("unknown", DIST, r"unhandled cuda error|ncclUnhandledCudaError|NCCL error|ncclInvalid\w+|^nccl\w+ failed",
           confidence=0.3),
    line("dns", r"""
        (?:nslookup|ping|wget|curl|ssh|getent|nc|host)\b.{0,100}(?:can't resolve|bad address|could not resolve)
        (?:nslookup|ping|wget|curl|ssh|getent|nc|host)\b.{0,100}(?:unknown host|Name or service|not known)
        \*\* server can't find"""),
    line("collective_mismatch", rf"""
        {BRACKETS}(?:Detected )?mismatch between collectives|Collective desync
        .{{0,60}}collectives? (?:mismatch|differ)|.{{0,40}}Mismatched collective detected"""),
    line("collective_timeout", rf"""
        {BRACKETS}Watchdog caught collective operation timeout|{BRACKETS}Some NCCL operations have failed or timed out
        {BRACKETS}(?:Received a dump signal due to a collective timeout|Timeout at NCCL work)
        {BRACKETS}WorkNCCL\(.{{0,300}}timing out|.{{0,40}}heartbeat monitor (?:timed out|has detected)
        {BRACKETS}ProcessGroupNCCL's watchdog got stuck
        .{{0,40}}One or more tensors were submitted to be reduced.{{0,80}}by subset of ranks""", confidence=0.8),
    line("rendezvous", r"""
        (?:\S+: )?Rendezvous\w*Error|The node '?\S+ (?:has failed to shutdown|attempted to join)
        .{0,60}rendezvous.{0,60}(?:timed out|has (?:timed out|been closed))
        Timed out waiting for (?:workers|nodes|all)""", confidence=0.7),
    line("port_in_use", r"""
        (?:\[[^\]]{1,80}\]\s*)?The server socket has failed to (?:listen|bind)
        (?:\S+: ){0,3}bind\S* .{0,60}(?:failed|error|address already).{0,30}(?:in use|98)
        .{0,60}listen tcp .{0,40}bind: address already in use""", confidence=0.8),
    line("nccl_efa", r".{0,80}Unable to write to EQ: Missing or unavailable event queue", confidence=0.8),
    line("echo", rf"""
        Sending process \d+ closing signal|Received (?:\d+|SIGTERM) death signal|Received signal 15
        .{{0,60}}(?:got|received|caught) signal:? (?:15|SIGTERM)|failed \(exitcode: -15\)|terminate called without
        slurmstepd: error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*$|recvValue failed
        srun: (?:error: \S+: tasks? \S+: (?:Terminated|Killed)|Terminating|Job step aborted)
        {BRACKETS}(?:Process group watchdog thread terminated|To avoid data inconsistency|Observed flight recorder)
        {BRACKETS}(?:Future for ProcessGroup abort|First PG on this rank to signal dumping)
        Exception \(either an error or timeout\) detected by watchdog""", confidence=0.3),
    # What NCCL, libfabric and torch's sockets said just before makes a failure of the group more precise.
    near("collective_mismatch", ANY_SOFT, r"Mismatched collective detected|Message truncated ?: rece"),
    near("gpu_count", ANY_SOFT, r"Duplicate GPU detected"),
    near("nccl_efa", ANY_SOFT + " segfault", r"""
        NET/OFI.{0,200}(?:fail|error|unable|no eligible|could ?n.t|unexpected|invalid|mismatch|time-?out|timed out)
        fi_[a-z_]+ .{0,60}(?:failed|error)
        libfabric:.{0,200}(?:err|fail|unable|cannot)|Unable to register memory|No eligible providers
        efa_\w+.{0,100}(?:fail|err|unable)|EFA.{0,60}Couldn't enable endpoint|provider efa output empty"""),
    near("gpu_hardware", ANY_SOFT, r"""
        uncorrectable (?:ECC|NVLink)|GPU has fallen off|NVLink.{0,60}(?:fatal|error)|NVRM: Xid"""),
    near("shm", ANY_SOFT, r"""
        Error while creating shared memory segment|/dev/shm/nccl\S+ .{0,60}No space left
        Call to (?:posix_fallocate|ftruncate) failed.{0,60}No space left|unable to allocate shared memory"""),
    near("cuda_oom", ANY_SOFT, r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)"),
    near("driver_too_old", ANY_SOFT, r"""
        Cuda failure (?:\d+ )?'(?:CUDA driver version is insufficient|API call is not supported in the installed)"""),
    near("illegal_memory_access", "unknown", r"""
        Cuda failure (?:\d+ )?'(?:an illegal memory|unspecified launch|misaligned)"""),
    near("gpu_arch", "unknown", r"Cuda failure (?:\d+ )?'no kernel image"),
    near("gpu_count", "unknown", r"Cuda failure (?:\d+ )?'invalid device ordinal"),
    near("too_many_files", ANY_SOFT, r"Too many open files"),
    near("dns", ANY_SOFT, r"""
        gai error: -|Name or service not known|Temporary failure in name resolution|could not resolve|no such host
        getaddrinfo"""),
    near("nccl_network", "rendezvous collective_timeout echo unknown", r"""
        (?:socketStartConnect|socketPollConnect|Connect to \S+ failed|Call to connect).{0,160}(?:refused|timed|route)
        no socket interface found|NET/IB.{0,80}(?:completion with error|Got completion|Got async event|timeout)
        ibv_\w+ failed|IBV_WC_RETRY_EXC|No route to host|Network is unreachable|Software caused connection abort
        interface \S+ not found|port (?:error|down)|link (?:is )?down"""),
)  # fmt: skip
