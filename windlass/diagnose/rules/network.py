"""The network between ranks: NCCL, EFA, Gloo, rendezvous, names, ports; and what is only an echo."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import ECHO, SOFT, WEAK, line, near, raised

DIST = (
    r"(?:[\w:]+[.:])*(?:Dist\w*Error|RuntimeError|Connection\w*Error|TimeoutError|OSError|BrokenPipeError"
    r"|Error|HorovodInternalError|c10::\w+|runtime_error)"
)  # fmt: skip
ANY_SOFT = "nccl_network rendezvous collective_timeout echo"

RULES = (
    # Said by torch, and never the fault of the network.
    raised("collective_mismatch", DIST, r"mismatch between collectives|collectives? (?:mismatch|differ)"
            r"|Mismatched? collective|ran different collectives|mismatched (?:op|shape|tensor)"
            r"|desync.{0,100}(?:mismatch|different)|Detected.{0,40}mismatch"),
    raised("gpu_count", DIST, r"Duplicate GPU detected|multiple processes.{0,40}same GPU"),
    raised("port_in_use", None, r"EADDRINUSE|Address already in use|\[Errno 98\]|port \d+ is already (?:in use"
            r"|allocated)|address in use", strength=28),
    raised("nccl_efa", DIST, r"NET/OFI|libfabric|\bfi_[a-z_]+|\bEFA\b|Unable to register memory"
            r"|No eligible providers|aws-ofi|ofi_\w+", strength=25),
    raised("dns", None, r"Name or service not known|Temporary failure in name resolution"
            r"|No address associated with hostname|nodename nor servname|gai error: -|getaddrinfo failed"
            r"|Could not resolve host|cannot be retrieved \(gai", strength=22,
            test=lambda text: "huggingface" not in text and "amazonaws" not in text and "googleapis" not in text),
    # The watchdog and gloo's time-outs: somebody did not come.
    raised("collective_timeout", DIST, r"Watchdog caught collective operation timeout"
            r"|ran for \d+ milliseconds before timing out|Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation"
            r"|monitoredBarrier.{0,200}(?:failed|timed out|timeout)|Some NCCL operations have failed or timed out"
            r"|Application timeout caused pair closure|NCCL timeout|collective.{0,40}timed? ?out", strength=WEAK),
    raised("rendezvous", r"(?:\w+\.)*Rendezvous\w*Error", strength=18),
    raised("rendezvous", r"(?:\w+\.)*(?:DistStoreError|DistNetworkError|DistBackendError|RuntimeError|TimeoutError"
            r"|DistError|ConnectionError|Exception)", r"client socket has (?:timed out|failed to connect)"
            r"|Timed out after \d+ seconds waiting for clients|clients joined|wait timeout after \d+ ?ms|Socket Timeout"
            r"|failed to connect to (?:any network|TCPStore)|rendezvous.{0,100}(?:time|closed|fail)"
            r"|Store.{0,30}timed? ?out|timed out.{0,60}waiting for (?:workers|nodes|clients|all)|waitForInput: poll",
            strength=18),
    raised("cancelled", r"(?:\w+\.)*KeyboardInterrupt", strength=11, confidence=0.6),
    raised("cancelled", r"(?:\w+\.)*SignalException", r"got signal: [12]\b", strength=11, confidence=0.55),
    # Echoes: another rank ended first.
    raised("echo", DIST, r"remote process (?:has )?(?:exited|terminated)|ncclRemoteError"
            r"|Connection (?:was )?(?:closed|reset) by|closed by (?:remote )?peer|Broken pipe|communicator (?:was"
            r"|has been) aborted|recvValue failed|failed to recv, got 0 bytes|got 0 bytes|Connection reset"
            r"|connection reset|peer (?:has )?(?:closed|died|exited)"
            r"|Process group watchdog thread terminated|ncclCommAbort|NCCL communicator was aborted|another rank"
            r"|was aborted on rank|Connection closed|Stop_waiting response|TCPStore.{0,60}(?:down|shut)"
            r"|Rank \d+ (?:is|has) (?:gone|failed|died)", strength=ECHO, confidence=0.4),
    raised("echo", r"(?:\w+\.)*(?:ChildFailedError|SignalException|PeerLostError|ProcessExitedException"
            r"|ProcessRaisedException|BrokenPipeError|ConnectionResetError|CalledProcessError"
            r"|EndSession|BrokenProcessPool|WorkerCrashedError|RayTaskError|SystemExit)",
            strength=ECHO, confidence=0.4),
    raised("nccl_network", DIST, r"socketStartConnect|socketPollConnect|socketFinalizeConnect|Connection refused"
            r"|Connection timed out|No route to host|Network is unreachable|no socket interface found"
            r"|no usable interface|ibv_\w+|IBV_|NET/IB|connectFullMesh|ncclSystemError|unhandled system error"
            r"|ncclInternalError|gloo/transport|gloo::|makeDeviceForInterface|Unable to find (?:address|interface)"
            r"|completion with error|NCCL error|Bootstrap :|unable to resolve", strength=SOFT,
            test=lambda text: "huggingface" not in text and "amazonaws.com" not in text),
    raised("nccl_network", None, r"^nccl\w+ failed|unhandled system error|ncclSystemError|^HorovodInternalError"
            r"|^NcclError", strength=SOFT),
    line("dns", r"(?:nslookup|ping|wget|curl|ssh|getent|nc|host)\b.{0,100}(?:can't resolve|bad address"
            r"|could not resolve|unknown host"
            r"|Name or service not known|not known)|\*\* server can't find", strength=22),
    line("collective_mismatch", r"(?:\[[^\]]{1,80}\]\s*){0,3}(?:Detected )?mismatch between collectives"
            r"|Collective desync|.{0,60}collectives? (?:mismatch|differ)"),
    line("collective_timeout", r"(?:\[[^\]]{1,80}\]:?\s*){0,4}Watchdog caught collective operation timeout"
            r"|(?:\[[^\]]{1,80}\]:?\s*){0,4}(?:Some NCCL operations have failed or timed out"
            r"|Received a dump signal due to a collective timeout|Timeout at NCCL work"
            r"|WorkNCCL\(.{0,300}before timing out)"
         r"|.{0,40}heartbeat monitor (?:timed out|has detected)"
         r"|(?:\[[^\]]{1,80}\]:?\s*){0,4}ProcessGroupNCCL's watchdog got stuck", strength=WEAK, confidence=0.8),
    line("rendezvous", r"(?:\S+: )?Rendezvous\w*Error|The node '?\S+ (?:has failed to shutdown|attempted to join)"
            r"|.{0,60}rendezvous.{0,60}(?:timed out|has (?:timed out|been closed))|Timed out waiting for (?:workers"
            r"|nodes|all)", strength=18, confidence=0.7),
    line("port_in_use", r"(?:\[[^\]]{1,80}\]\s*)?The server socket has failed to (?:listen|bind)"
            r"|(?:\S+: )?bind\S* .{0,60}(?:failed|error).{0,30}(?:in use|98)", strength=28, confidence=0.8),
    line("echo", r"Sending process \d+ closing signal|Received (?:\d+|SIGTERM) death signal|.{0,60}(?:got|received"
            r"|caught) signal:? (?:15|SIGTERM)|Received signal 15|slurmstepd: error: \*\*\* (?:STEP"
            r"|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*$"
         r"|srun: (?:error: \S+: tasks? \S+: (?:Terminated|Killed)|Terminating|Job step aborted)"
         r"|failed \(exitcode: -15\)|(?:\[[^\]]{1,80}\]:?\s*){0,4}(?:Process group watchdog thread terminated"
         r"|To avoid data inconsistency|Observed flight recorder|Future for ProcessGroup abort"
         r"|First PG on this rank to signal dumping)"
         r"|terminate called without|recvValue failed|Exception \(either an error or timeout\) detected by watchdog",
         strength=ECHO, confidence=0.3),
    # What NCCL, libfabric and torch's sockets said just before makes a failure of the group more precise.
    near("nccl_efa", ANY_SOFT, r"NET/OFI.{0,200}(?:fail|error|unable|no eligible|could not)"
            r"|fi_[a-z_]+ .{0,60}(?:failed|error)|libfabric:.{0,200}(?:err|fail)|Unable to register memory"
            r"|No eligible providers|efa_\w+.{0,100}(?:fail|err)|(?:EFA|efa).{0,60}Couldn't enable endpoint"),
    near("gpu_hardware", "nccl_network collective_timeout echo",
            r"uncorrectable (?:ECC|NVLink)|GPU has fallen off|Cuda failure (?:\d+ )?'uncorrectable"
            r"|NVLink.{0,60}(?:fatal|error)|NVRM: Xid"),
    near("shm", "nccl_network echo collective_timeout", r"Error while creating shared memory segment"
            r"|/dev/shm/nccl\S+ .{0,60}No space left|Call to (?:posix_fallocate"
            r"|ftruncate) failed.{0,60}No space left|unable to allocate shared memory"),
    near("cuda_oom", "nccl_network echo", r"Cuda failure (?:\d+ )?'out of memory'"),
    near("driver_too_old", "nccl_network", r"Cuda failure (?:\d+ )?'CUDA driver version is insufficient"),
    near("too_many_files", "nccl_network echo", r"Too many open files"),
    near("dns", "rendezvous nccl_network", r"gai error: -|Name or service not known"
            r"|Temporary failure in name resolution|could not resolve|no such host|getaddrinfo"),
    near("nccl_network", "rendezvous collective_timeout echo",
            r"(?:socketStartConnect|socketPollConnect|Connect to \S+ failed|Call to connect).{0,160}(?:refused"
            r"|timed out|No route|unreachable)|no socket interface found|NET/IB.{0,80}(?:completion with error"
            r"|Got async event|timeout)"
         r"|ibv_\w+ failed|IBV_WC_RETRY_EXC|No route to host|Network is unreachable"
         r"|socket\.cpp.{0,160}(?:No route to host)|Software caused connection abort|interface \S+ not found"),
)  # fmt: skip
