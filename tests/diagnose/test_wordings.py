"""Wordings of programs by class: exceptions, lines, events, answers and records, as they are printed."""

# ruff: noqa: E501 (messages as they are found in the field)

from __future__ import annotations

import json

import pytest

from tests.diagnose.test_verdict import PROGRESS, event, exited, pod
from tests.diagnose.test_verdict import traceback as T
from windlass.diagnose import Facts, diagnose

LIB = '  File "/workspace/train.py", line 88, in main\n    trainer.train()\n  File "/usr/local/lib/python3.10/dist-packages/transformers/trainer.py", line 2171, in train\n    return inner_training_loop(\n'
MINE = '  File "/workspace/train.py", line 88, in main\n    loss = step(batch)\n'
HF = '  File "/workspace/train.py", line 20, in <module>\n    model = AutoModel.from_pretrained(name)\n  File "/opt/venv/lib/python3.11/site-packages/huggingface_hub/utils/_http.py", line 406, in hf_raise_for_status\n    response.raise_for_status()\n'

CASES = []


def raised(name, error, frames=LIB, pre=PROGRESS):
    CASES.append((name, {"logs": {"rank0": f"{pre}\n{T(error, frames)}"}}))


def printed(name, *lines, pre=PROGRESS):
    CASES.append((name, {"logs": {"rank0": "\n".join((pre, *lines))}}))


def scheduling(name, reason, message):
    CASES.append((name, {"pods": [pod(phase="Pending", node="")], "events": [event(reason, message)]}))


def waiting(name, reason, message):
    state = {"waiting": {"reason": reason, "message": message}}
    CASES.append((name, {"pods": [pod(phase="Pending", state=state)]}))


def submitted(name, text):
    CASES.append((name, {"logs": {"submit": text}}))


def in_slurm(name, state, reason="None", log=""):
    record = f"JobId=7 JobName=x\n   JobState={state} Reason={reason} Dependency=(null)\n   ExitCode=0:0"
    CASES.append((name, {"slurm": {"scontrol": record}, "logs": {"slurm-7.out": log} if log else {}}))


def workload(name, kind, status, reason, message):
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    CASES.append((name, {"workload": {"status": {"conditions": [condition]}}}))


def pyxis(name, *lines):
    logged = [f"pyxis:     {line}" for line in lines]
    ends = ("pyxis: couldn't start container", "spank: required plugin spank_pyxis.so: task_init() failed with rc=-1")
    printed(name, *(f"slurmstepd: error: {line}" for line in (*logged, *ends)), pre="pyxis: importing docker image ...")


def known(name, **facts):
    CASES.append((name, facts))


# fmt: off
# cuda oom
raised("cuda_oom","torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 5 has a total capacity of 79.11 GiB of which 563.06 MiB is free. Process 2437 has 78.55 GiB memory in use. Of the allocated memory 76.16 GiB is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")
raised("cuda_oom","RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
raised("cuda_oom","jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")
raised("cuda_oom","RuntimeError: NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",pre="n1:1:2 [3] include/alloc.h:205 NCCL WARN Cuda failure 2 'out of memory'")
raised("cuda_oom","torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 63.98 GiB of which 0 bytes is free.")
raised("cuda_oom","ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",LIB+'  File "/opt/venv/lib/python3.11/site-packages/vllm/worker/worker.py", line 500, in raise_if_cache_size_invalid\n    raise ValueError("No available memory for the cache blocks. "\n')
# host oom
printed("host_oom","slurmstepd: error: Detected 1 oom_kill event in StepId=4321.0. Some of the step tasks have been OOM Killed.")
printed("host_oom","srun: error: gpu12: task 3: Out Of Memory")
printed("host_oom","ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.")
raised("host_oom","RuntimeError: DataLoader worker (pid(s) 12873, 12874) exited unexpectedly")
raised("host_oom","torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL")
CASES.append(("host_oom",{"logs":{"rank0":PROGRESS,"kernel":"[1234.5] Memory cgroup out of memory: Killed process 4182 (python3) total-vm:198234kB, anon-rss:8123kB"},"pods":[pod(phase="Failed",state=exited(137))]}))
printed("host_oom","E0412 10:11:12.131 140 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 2 (pid: 4182) of binary: /usr/bin/python3")
# shm
raised("shm","OSError: [Errno 28] No space left on device: '/dev/shm/torch_991_182'")
raised("shm","RuntimeError: unable to mmap 1048576 bytes from file </torch_1234_5678_9>: Cannot allocate memory (12)")
printed("shm","Fatal Python error: Bus error","","Current thread 0x00007f (most recent call first):")
# files
raised("too_many_files","OSError: [Errno 24] Too many open files",MINE)
printed("too_many_files","OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable")
raised("too_many_files","RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` in the shell or change the sharing strategy by calling `torch.multiprocessing.set_sharing_strategy('file_system')`")
# nccl
raised("nccl_network","torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3355, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nsocketPollConnect: connect to 10.0.3.11<43215> returned Connection timed out, exceeded error retry count after 35 attempts")
raised("nccl_network","RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error")
raised("nccl_network","torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error, NCCL version 2.23.4\nncclSystemError\nLast error:\nCall to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_3:1, curr state INIT, next state RTR")
raised("nccl_network","RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find interface for: [0.0.0.0]")
printed("nccl_network","node3:88:132 [4] transport/net_ib.cc:2231 NCCL WARN NET/IB: Got completion from peer 10.1.1.4<50123> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129 req_type=Send localGid fe80::1 remoteGids fe80::2 hca mlx5_0")
raised("nccl_efa","torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, internal error\nncclInternalError: Internal check failed.\nLast error:\nNET/OFI OFI fi_getinfo() call failed: No data available")
printed("nccl_efa","ip-10-0-1-4:77:130 [2] nccl_net_ofi_create_plugin:213 NCCL WARN NET/OFI Failed to initialize rdma protocol",T("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2021, unhandled system error, NCCL version 2.21.5\nncclSystemError: System call failed"))
raised("collective_timeout","torch.distributed.DistBackendError: [Rank 12] Collective WorkNCCL(SeqNum=9123, OpType=_REDUCE_SCATTER_BASE, NumelIn=4096, NumelOut=512, Timeout(ms)=1800000) ran for 1800071 milliseconds before timing out.")
printed("collective_timeout","[rank7]:[E601 06:11:02.817 ProcessGroupNCCL.cpp:632] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=11, OpType=ALLGATHER, NumelIn=2, NumelOut=16, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.","[rank7]:[E601 06:11:03.001 ProcessGroupNCCL.cpp:756] [Rank 7] Some NCCL operations have failed or timed out.","terminate called after throwing an instance of 'c10::DistBackendError'","  what():  [PG ID 0 PG GUID 0 Rank 7] Process group watchdog thread terminated with exception: [Rank 7] Watchdog caught collective operation timeout")
raised("collective_timeout","RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete")
raised("collective_mismatch","RuntimeError: DDP expects same model across all ranks, but Rank 1 has 148 params, while rank 0 has inconsistent 150 params.")
raised("collective_mismatch","RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8388608 vs 4194304")
raised("collective_mismatch","RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=88, OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=88, OpType=ALLREDUCE)")
raised("rendezvous","torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.")
raised("rendezvous","torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.")
raised("rendezvous","RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=4, worker_count=2, timeout=0:30:00)")
raised("dns","torch.distributed.DistNetworkError: The IPv6 network addresses of (llama-master-0.llama.svc.cluster.local, 29500) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).")
printed("dns","ssh: Could not resolve hostname worker-1: Name or service not known",pre="+ mpirun -np 16")
raised("port_in_use","RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29400 (errno: 98 - Address already in use).")
scheduling("port_in_use","FailedScheduling","0/6 nodes are available: 2 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 4 node(s) didn't have free ports for the requested pod ports.")
# libs
raised("library_clash","ImportError: /opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",MINE)
raised("library_clash","ImportError: libcublas.so.12: cannot open shared object file: No such file or directory",MINE)
raised("library_clash","RuntimeError: Failed to import transformers.models.llama.modeling_llama because of the following error (look up to see its traceback):\n/usr/local/lib/python3.10/dist-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZNK3c105Error4whatEv")
raised("library_clash","RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 1, 0) but found runtime version (8, 9, 7).")
raised("library_clash","AttributeError: _ARRAY_API not found",MINE)
raised("driver_too_old","RuntimeError: The NVIDIA driver on your system is too old (found version 11080). Please update your GPU driver by downloading and installing a new version")
waiting("driver_too_old","RunContainerError",'failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: error running hook #0: exit status 1, stderr: Auto-detected mode as \'legacy\'\nnvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6, please update your driver to a newer version, or use an earlier cuda container: unknown')
raised("gpu_arch","RuntimeError: CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be asynchronously reported")
raised("gpu_arch","ValueError: Your setup doesn't support bf16/gpu. You need Ampere+ GPU with cuda>=11.0",LIB)
raised("gpu_hardware","torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'")
raised("gpu_hardware","RuntimeError: CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported")
CASES[-1][1]["logs"]["kernel"] = "[7711.1] NVRM: Xid (PCI:0000:9b:00): 95, pid=881, name=python, Uncontained ECC error"
raised("gpu_hardware","RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error")
printed("gpu_hardware","Unable to determine the device handle for GPU 0000:CD:00.0: Unknown Error",pre="$ nvidia-smi")
raised("gpu_count","RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported",MINE)
raised("gpu_count","ValueError: Requested GPUs [0, 1, 2, 3, 4, 5, 6, 7] but only 4 are available",LIB)
raised("gpu_hardware","RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized")
raised("gpu_runtime","RuntimeError: No CUDA GPUs are available")
CASES[-1][1]["pods"] = [pod(phase="Failed",state=exited(1))]
# hub
raised("hub_gated","OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/google/gemma-2-9b.\n403 Client Error. (Request ID: x)",HF)
raised("hub_gated","huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2 (Request ID: x)\n\nInvalid credentials in Authorization header",HF)
raised("hub_missing","huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1)\n\nRepository Not Found for url: https://huggingface.co/api/models/meta/Llama-9.\nPlease make sure you specified the correct `repo_id` and `repo_type`.",HF)
raised("hub_missing","OSError: Can't load the configuration of 'my-modle'. If you were trying to load it from 'https://huggingface.co/models', make sure you don't have a local directory with the same name.",LIB)
raised("hub_missing","datasets.exceptions.DatasetNotFoundError: Dataset 'foo/bar' doesn't exist on the Hub or cannot be accessed.",LIB)
raised("hub_rate_limit","huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/x/tree/main",HF)
raised("hub_rate_limit","RuntimeError: Data processing error: CAS service error : ReqwestMiddleware Error: Request failed after 5 retries",HF)
raised("hub_rate_limit","requests.exceptions.ReadTimeout: (ReadTimeoutError(\"HTTPSConnectionPool(host='cdn-lfs.hf.co', port=443): Read timed out. (read timeout=10)\"), '(Request ID: 3)')",HF)
raised("hub_offline","huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache. Please check your connection and try again or make sure your Internet connection is on.",HF)
raised("hub_offline","httpx.ConnectError: [Errno -2] Name or service not known",HF)
raised("hub_offline","OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\nCheck your internet connection or see how to run the library in offline mode at",LIB)
# stores
raised("store_access","botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden")
raised("store_access","PermissionError: Access Denied",'  File "/workspace/d.py", line 3, in f\n    fs.open(p)\n  File "/usr/lib/python3/dist-packages/s3fs/core.py", line 140, in _error_wrapper\n    raise err\n')
raised("store_access","google.api_core.exceptions.Forbidden: 403 GET https://storage.googleapis.com/storage/v1/b/data: sa@x.iam.gserviceaccount.com does not have storage.objects.get access")
raised("store_access","OSError: When reading information for key 'a/b' in bucket 'c': AWS Error ACCESS_DENIED during HeadObject operation: No response body.")
raised("store_transient","botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): Please reduce your request rate.")
raised("store_transient","botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: \"https://bucket.s3.us-west-2.amazonaws.com/x\"")
raised("store_transient","urllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(1048576 bytes read, 7340032 more expected)', IncompleteRead(1048576 bytes read, 7340032 more expected))",'  File "/workspace/d.py", line 3, in f\n    body.read()\n  File "/usr/lib/python3/dist-packages/botocore/response.py", line 99, in read\n    chunk = self._raw_stream.read(amt)\n')
# disk
raised("disk_full","RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
raised("disk_full","OSError: Not enough disk space. Needed: 335.55 GiB (download: 12 GiB, generated: 300 GiB)",LIB)
raised("disk_full","OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache/x'",MINE)
raised("file_system","OSError: [Errno 5] Input/output error",MINE)
raised("file_system","OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/a.bin'",MINE)
raised("file_system","OSError: [Errno 30] Read-only file system: '/scratch/ckpt'",MINE)
raised("checkpoint_damaged","RuntimeError: PytorchStreamReader failed reading file data/23: file read failed",LIB)
raised("checkpoint_damaged","safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",LIB)
raised("checkpoint_damaged","EOFError: Ran out of input",'  File "/workspace/train.py", line 8, in main\n    state = torch.load(path)\n  File "/usr/lib/python3/dist-packages/torch/serialization.py", line 1258, in _legacy_load\n    magic_number = pickle_module.load(f)\n')
raised("checkpoint_mismatch","RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([32000, 4096]) from checkpoint, the shape in current model is torch.Size([32001, 4096]).",LIB)
raised("checkpoint_mismatch","AssertionError: hidden_size value from checkpoint (4096) is not equal to the input argument value (5120).",MINE)
# user
raised("user_import","ModuleNotFoundError: No module named 'deepspeed'",MINE,pre="")
raised("user_import","ImportError: cannot import name 'foo' from 'mypkg.utils' (/workspace/mypkg/utils.py)",MINE,pre="")
printed("user_import","/usr/bin/python3: No module named torchrun",pre="")
printed("user_arguments","usage: train.py [-h] --data DATA","train.py: error: unrecognized arguments: --flash",pre="")
printed("user_arguments","train.py: error: argument --lr: invalid float value: '1e-'",pre="")
raised("user_arguments","FileNotFoundError: [Errno 2] No such file or directory: 'configs/llama.yaml'",MINE,pre="")
raised("user_arguments","pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\nlr\n  Input should be a valid number",LIB,pre="")
raised("user_arguments","omegaconf.errors.ConfigAttributeError: Key 'optimizr' is not in struct",LIB,pre="")
raised("user_code","AttributeError: 'NoneType' object has no attribute 'shape'",MINE)
raised("user_code","RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x768 and 1024x1024)",LIB)
raised("user_code","RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",LIB)
raised("user_code","NotImplementedError: \"addmm_impl_cpu_\" not implemented for 'Half'",LIB)
raised("user_code","torch._dynamo.exc.Unsupported: call_function BuiltinVariable(print) [ConstantVariable(str)] {}",LIB)
raised("user_code","requests.exceptions.ConnectionError: reward server down",'  File "/workspace/train.py", line 3, in f\n    raise requests.exceptions.ConnectionError("reward server down")\n')
raised("user_code","RuntimeError: CUDA out of memory budget exceeded by policy: NCCL timeout expected",'  File "/workspace/train.py", line 3, in f\n    raise RuntimeError(msg)\n')
raised("user_data","UnicodeDecodeError: 'utf-8' codec can't decode byte 0x8b in position 1: invalid start byte",MINE)
raised("user_data","pyarrow.lib.ArrowInvalid: JSON parse error: Missing a closing quotation mark in string. in row 55",LIB)
raised("user_data","RuntimeError: stack expects each tensor to be equal size, but got [512] at entry 0 and [498] at entry 3",LIB)
raised("user_data","KeyError: 'text'",'  File "/workspace/train.py", line 3, in f\n    for b in loader:\n  File "/workspace/dataset.py", line 31, in __getitem__\n    return row["text"]\n')
raised("device_assert","RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",LIB,pre="../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.")
raised("illegal_memory_access","torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'",LIB)
printed("segfault","Fatal Python error: Segmentation fault","","Thread 0x00007f (most recent call first):",'  File "/workspace/ext.py", line 3 in run')
printed("segfault","E1119 08:26:02.715000 28705 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -11) local_rank: 0 (pid: 28773) of binary: /usr/bin/python3")
raised("segfault","subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGSEGV: 11>.",'  File "/usr/lib/python3.10/site-packages/torch/distributed/launch.py", line 3, in main\n    raise subprocess.CalledProcessError(\n')
raised("nan","Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",LIB)
raised("nan","RuntimeError: Rank 3, node gpu5, device 3, iteration 2201: found NaN in local grad norm in backward pass before data-parallel communication collective",LIB)
printed("nan","2026-11-15 10:05:00 ERROR Loss is nan, stopping training")
# k8s
scheduling("gpu_unavailable","FailedScheduling","0/8 nodes are available: 8 Insufficient nvidia.com/gpu. preemption: 0/8 nodes are available: 8 No preemption victims found for incoming pod.")
scheduling("node_affinity","FailedScheduling","0/8 nodes are available: 8 node(s) didn't match Pod's node affinity/selector. preemption: 0/8 nodes are available: 8 Preemption is not helpful for scheduling.")
scheduling("taint","FailedScheduling","0/4 nodes are available: 4 node(s) had untolerated taint {sku: gpu}. preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling.")
scheduling("pod_limit","FailedScheduling","0/3 nodes are available: 3 Too many pods. preemption: not eligible")
scheduling("volume_unbound","FailedScheduling","0/3 nodes are available: 3 node(s) had volume node affinity conflict.")
scheduling("mount_failed","FailedMount",'Unable to attach or mount volumes: unmounted volumes=[data], unattached volumes=[data kube-api-access]: timed out waiting for the condition')
scheduling("mount_failed","FailedMount",'MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32 Mounting command: mount Output: mount.nfs: access denied by server while mounting 10.0.0.9:/export')
scheduling("config_missing","FailedMount",'MountVolume.SetUp failed for volume "cfg" : secret "hf-secret" not found')
scheduling("ip_exhausted","FailedCreatePodSandBox",'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "ab": plugin type="aws-cni" name="aws-cni" failed (add): add cmd: failed to assign an IP address to container')
scheduling("cloud_capacity","FailedScaleUp","Node scale up in zones us-central1-a associated with this pod failed: GCE out of resources. Pod is at risk of not being scheduled.")
scheduling("gpu_runtime","FailedCreatePodSandBox",'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to get sandbox runtime: no runtime for "nvidia" is configured')
waiting("image_missing","ImagePullBackOff",'Back-off pulling image "ghcr.io/a/b:v2": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack image "ghcr.io/a/b:v2": failed to resolve reference "ghcr.io/a/b:v2": ghcr.io/a/b:v2: not found')
waiting("image_auth","ErrImagePull",'rpc error: code = Unknown desc = failed to pull and unpack image "ghcr.io/a/b:v2": failed to resolve reference: failed to authorize: failed to fetch anonymous token: unexpected status from GET request to https://ghcr.io/token: 403 Forbidden')
waiting("image_rate_limit","ErrImagePull",'rpc error: code = Unknown desc = failed to pull and unpack image: failed to copy: httpReadSeeker: failed open: unexpected status code https://registry-1.docker.io/v2/x: 429 Too Many Requests - Server message: toomanyrequests: You have reached your unauthenticated pull rate limit')
waiting("container_start","CreateContainerError",'failed to generate container "x" spec: failed to generate spec: no command specified')
waiting("container_start","RunContainerError",'failed to create containerd task: OCI runtime create failed: runc create failed: unable to start container process: exec: "torchrun": executable file not found in $PATH: unknown')
waiting("config_missing","CreateContainerConfigError",'configmap "train-env" not found')
CASES.append(("evicted_disk",{"pods":[pod(phase="Failed",reason="Evicted",message='Pod ephemeral local storage usage exceeds the total limit of containers 50Gi. ')]}))
CASES.append(("evicted_memory",{"pods":[pod(phase="Failed",reason="Evicted",message='The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container pytorch was using 120Gi, request is 64Gi')]}))
CASES.append(("preempted",{"pods":[pod(phase="Failed",state=exited(143))],"events":[event("Preempted","Preempted by pod 7d3 on node gke-1")]}))
CASES.append(("preempted",{"pods":[pod(phase="Failed",reason="Terminated",message="Pod was terminated in response to imminent node shutdown.")]}))
CASES.append(("node_lost",{"pods":[pod(phase="Running",state={"running":{}},conditions=[{"type":"DisruptionTarget","status":"True","reason":"DeletionByTaintManager","message":"Taint manager: deleting due to NoExecute taint"}])],"nodes":[{"metadata":{"name":"node-a"},"spec":{"taints":[{"key":"node.kubernetes.io/unreachable","effect":"NoExecute"}]},"status":{"conditions":[{"type":"Ready","status":"Unknown","reason":"NodeStatusUnknown","message":"Kubelet stopped posting node status."}]}}]}))
CASES.append(("time_limit",{"job":{"kind":"Job","metadata":{"name":"train"},"status":{"conditions":[{"type":"Failed","status":"True","reason":"DeadlineExceeded","message":"Job was active longer than specified deadline"}]}}}))
CASES.append(("preempted",{"pods":[pod(phase="Failed",state=exited(143))],"events":[event("Evicted","Evicted pod: Underutilized")]}))
printed("store_access","google.api_core.exceptions.Forbidden: 403 GET https://storage.googleapis.com/storage/v1/b/data?projection=noAcl: sa@p.iam.gserviceaccount.com does not have storage.buckets.get access to the Google Cloud Storage bucket.")
workload("queue_wait","QuotaReserved","False","Pending","couldn't assign flavors to pod set worker: insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed")
workload("queue_never","QuotaReserved","False","Inadmissible","LocalQueue team-queue doesn't exist")
workload("preempted","Evicted","True","Preempted","Preempted to accommodate a workload (UID: abc, JobUID: def) due to prioritization in the ClusterQueue")
# submit
submitted("api_unreachable","Error from server (InternalError): error when creating \"job.yaml\": Internal error occurred: failed calling webhook \"mpytorchjob.kb.io\": failed to call webhook: Post \"https://kueue-webhook-service.kueue-system.svc:443/mutate?timeout=10s\": no endpoints available for service \"kueue-webhook-service\"")
submitted("operator_missing","error: unable to recognize \"job.yaml\": no matches for kind \"TrainJob\" in version \"trainer.kubeflow.org/v1alpha1\"")
submitted("api_forbidden","Error from server (Forbidden): error when creating \"job.yaml\": pytorchjobs.kubeflow.org is forbidden: User \"system:serviceaccount:a:b\" cannot create resource \"pytorchjobs\" in API group \"kubeflow.org\" in the namespace \"prod\"")
submitted("quota","Error creating: pods \"x-0\" is forbidden: exceeded quota: gpu-quota, requested: requests.nvidia.com/gpu=8, used: 16, limited: 16")
submitted("admission_denied","Error from server: error when creating \"pod.yaml\": admission webhook \"validation.gatekeeper.sh\" denied the request: [no-privileged] Privileged container is not allowed")
submitted("api_credentials","error: You must be logged in to the server (the server has asked for the client to provide credentials)")
submitted("clock_skew","An error occurred (RequestTimeTooSkewed) when calling the ListObjects operation: The difference between the request time and the current time is too large.")
submitted("queue_never","sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)")
submitted("api_credentials","sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified")
submitted("schema_mismatch","Error from server (BadRequest): error when creating \"j.yaml\": PyTorchJob in version \"v1\" cannot be handled as a PyTorchJob: strict decoding error: unknown field \"spec.nprocPerNodee\"")
in_slurm("queue_wait","PENDING","Resources")
in_slurm("queue_wait","PENDING","QOSMaxCpuPerUserLimit")
in_slurm("queue_wait","PENDING","(ReqNodeNotAvail, UnavailableNodes:gpu[1-4])")
in_slurm("job_held","PENDING","JobHeldAdmin")
in_slurm("job_held","PENDING","DependencyNeverSatisfied")
in_slurm("queue_never","PENDING","PartitionTimeLimit")
in_slurm("queue_never","PENDING","AssocMaxGRESPerJob")
in_slurm("host_oom","OUT_OF_MEMORY")
in_slurm("node_lost","NODE_FAIL","NodeDown")
in_slurm("preempted","PREEMPTED")
in_slurm("time_limit","TIMEOUT","TimeLimit")
in_slurm("cancelled","CANCELLED","None")
in_slurm("user_code","FAILED","NonZeroExitCode",T("TypeError: f() missing 1 required positional argument: 'x'",MINE))
in_slurm("container_start","FAILED","NonZeroExitCode","/var/spool/slurmd/job7/slurm_script: line 12: torchrn: command not found")
# several sources together
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====\ntrain.py FAILED\n----\nFailures:\n  <NO_OTHER_FAILURES>\n----\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-11-15_10:39:43\n  host      : d-9\n  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 28)\n  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n===="
RESET = T("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a network error\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10.0.0.3<5555>",LIB)
raised("user_data","KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File \"/opt/conda/lib/python3.10/site-packages/torch/utils/data/_utils/worker.py\", line 308, in _worker_loop\n    data = fetcher.fetch(index)\n  File \"/workspace/dataset.py\", line 44, in __getitem__\n    return self.rows[i]['text']\nKeyError: 'text'")
raised("file_system","OSError: Caught OSError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n  File \"/workspace/dataset.py\", line 44, in __getitem__\n    return open(p)\nOSError: [Errno 5] Input/output error: '/lustre/x'")
known("user_code",logs={"launcher":"2026-11-15 10:00:00 INFO start\nray.exceptions.RayTaskError(ValueError): ray::TrainWorker.step() (pid=12, ip=10.0.0.2)\n  File \"/workspace/train.py\", line 3, in step\n    raise ValueError('bad reward shape')\nValueError: bad reward shape"})
printed("host_oom","[2026-11-15 10:09:00,120] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 5123","[2026-11-15 10:09:00,121] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3', '-u', 'train.py'] exits with return code = -9")
printed("segfault","--------------------------------------------------------------------------","mpirun noticed that process rank 3 with PID 0 on node gpu4 exited on signal 11 (Segmentation fault).")
printed("host_oom","mpirun noticed that process rank 3 with PID 0 on node gpu4 exited on signal 9 (Killed).")
known("user_code",pods=[pod(phase="Running",state={"waiting":{"reason":"CrashLoopBackOff","message":"back-off 5m0s restarting failed container=pytorch"}},last=exited(1))],events=[event("BackOff","Back-off restarting failed container pytorch in pod train-worker-0")],logs={"train-worker-0-previous":T("TypeError: forward() got an unexpected keyword argument 'foo'",MINE)})
known("cuda_oom",logs={"rank0":PROGRESS+"\n"+RESET,"rank3":PROGRESS+"\n"+T("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 77.9 GiB memory in use. Of the allocated memory 76.0 GiB is allocated by PyTorch, and 300.0 MiB is reserved by PyTorch but unallocated.",LIB),"launcher": CHILD_FAILED})
known("user_import",logs={"rank0":T("ModuleNotFoundError: No module named 'flash_attn'",MINE)+"\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python","launcher":T("subprocess.CalledProcessError: Command '['python','x']' returned non-zero exit status 1.",LIB)})
known("node_lost",pods=[pod(phase="Failed",state=exited(1)),pod("train-worker-1",node="node-b",phase="Unknown",reason="NodeLost",message="Node node-b which was running pod train-worker-1 is unresponsive")],logs={"rank0":PROGRESS+"\n"+RESET})
known("image_missing",pods=[pod(state={"running":{}}),pod("train-worker-1",phase="Pending",state={"waiting":{"reason":"ImagePullBackOff","message":'Back-off pulling image "r.io/x:y"'}})],events=[event("Failed",'Failed to pull image "r.io/x:y": rpc error: code = NotFound desc = failed to pull and unpack image "r.io/x:y": r.io/x:y: not found',"train-worker-1")],logs={"rank0":T("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.",LIB)})
known("cancelled",job={"metadata":{"name":"train","deletionTimestamp":"2026-11-15T10:10:00Z"},"status":{}},pods=[pod(phase="Failed",state=exited(143,at="2026-11-15T10:10:05Z"))],logs={"rank0":PROGRESS+"\nreceived SIGTERM, shutting down"})
known("illegal_memory_access",logs={"rank0":PROGRESS+"\n"+T("RuntimeError: CUDA error: an illegal memory access was encountered",LIB),"kernel":"[1.1] NVRM: Xid (PCI:0000:4b:00): 31, pid=9, name=python, Ch 00000010, intr 10000000. MMU Fault: ENGINE GRAPHICS"})
known("gpu_hardware",logs={"rank0":PROGRESS+"\n[rank0]:[E1115 10:36:00.1 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out.","kernel":"Nov 15 10:25:31 gpu7 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."})
known("user_code",logs={"rank0":"wandb: WARNING Network error (ConnectionError), entering retry loop.\n"+PROGRESS+"\n"+T("ZeroDivisionError: division by zero",MINE)})
known("hub_rate_limit",logs={"rank0":"WARNING:huggingface_hub.utils._http:HTTP Error 429 thrown while requesting GET https://huggingface.co/api/datasets/x\nWARNING:huggingface_hub.utils._http:Retrying in 1s [Retry 1/5].\n"+T("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/datasets/x",HF)})
raised("cuda_oom","tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[256,1024,4096] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc")
raised("gpu_runtime","RuntimeError: Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices. (you may need to uninstall the failing plugin package, or set JAX_PLATFORMS=cpu to skip this backend.)")
raised("user_code","RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method")
raised("library_clash","FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",LIB)
raised("library_clash","RuntimeError: \n        CUDA Setup failed despite GPU being available. Please run the following command to get more information:",LIB)
raised("file_system","OSError: [Errno 16] Device or resource busy: '.nfs00000000a1'",MINE)
known("preempted",pods=[pod(phase="Failed",state=exited(143),conditions=[{"type":"DisruptionTarget","status":"True","reason":"EvictionByEvictionAPI","message":"Eviction API: evicting"}])],logs={"rank0":PROGRESS+"\n"+T("torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15",LIB)})
known("time_limit",slurm={"sacct":"JobID|JobName|State|ExitCode|Start|End|Timelimit\n9|t|TIMEOUT|0:0|2026-11-15T08:00:00|2026-11-15T10:10:00|02:10:00\n9.batch|batch|CANCELLED|0:15|x|x|\n9.0|python|CANCELLED|0:15|x|x|"},logs={"rank0":PROGRESS+"\nslurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-15T10:10:00 DUE TO TIME LIMIT ***\n"+RESET})
known("user_code",job={"metadata":{"name":"train"},"status":{"conditions":[{"type":"Failed","status":"True","reason":"BackoffLimitExceeded","message":"Job has reached the specified backoff limit"}]}},pods=[pod(phase="Failed",state=exited(1))],logs={"rank0":T("AttributeError: 'Config' object has no attribute 'lr'",MINE)})
known("user_arguments",pods=[pod(phase="Failed",state=exited(2))],logs={"rank0":"usage: train.py [-h]\ntrain.py: error: the following arguments are required: --data"})
known("evicted_disk",pods=[pod(phase="Failed",reason="Evicted",message="The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi.")],logs={"rank0":PROGRESS})
known("quota",job={"metadata":{"name":"train"}},events=[event("FailedCreate",'Error creating: pods "train-0-abc" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8',"train","Job")])
known("admission_denied",job={"metadata":{"name":"train"}},events=[event("FailedCreatePod",'Error creating: pods "train-0" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "shm")',"train","PyTorchJob")])
known("hang",pods=[pod(state={"running":{}})],logs={"rank0":PROGRESS,"monitor":"2026-11-15 11:20:00 WARNING no progress for 4500 s, GPU utilization 100%"})
known("straggler",logs={f"rank{r}":"\n".join(f"2026-11-15 10:0{i}:00 INFO step {i} loss 2.1 iter_time: {2.9 if r==5 else 1.1}s" for i in range(6)) for r in range(8)})
known("running",pods=[pod(state={"running":{}})],logs={"rank0":"2026-11-15 09:59:00 WARNING:huggingface_hub: 429 Too Many Requests, retrying in 5s\n"+PROGRESS})
known("succeeded",slurm={"sacct":"JobID|State|ExitCode\n4|COMPLETED|0:0\n4.batch|COMPLETED|0:0"},logs={"rank0":PROGRESS+"\nTraining complete."})
known("unknown",pods=[pod(phase="Failed",state=exited(1))],logs={"rank0":PROGRESS})
known("unknown",slurm={"sacct":"JobID|State|ExitCode\n4|FAILED|1:0"},logs={"rank0":PROGRESS+"\nsrun: error: n1: task 0: Exited with exit code 1"})
known("node_lost",slurm={"sacct":"JobID|State|ExitCode\n4|NODE_FAIL|0:0\n4.0|CANCELLED|0:9"},logs={"rank0":PROGRESS,"rank8":PROGRESS+"\n"+RESET})
known("cancelled",slurm={"sacct":"JobID|State|ExitCode\n4|CANCELLED by 1001|0:0\n4.0|CANCELLED by 1001|0:15"},logs={"rank0":PROGRESS+"\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-15T10:10:00 ***"})
known("nccl_slow_fallback",pods=[{**pod(state={"running":{}}),"spec":{"nodeName":"a","containers":[{"name":"pytorch","resources":{"limits":{"vpc.amazonaws.com/efa":"32"}}}]}}],logs={"rank0":"ip:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.\nip:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nip:1:1 [0] NCCL INFO Using network Socket\n"+PROGRESS})
known("gpu_runtime",pods=[pod(phase="Failed",reason="UnexpectedAdmissionError",message="Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected")])
known("checkpoint_damaged",logs={"rank0":T("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])\nTraceback (most recent call last): (RANK 0)\n  File \"/x/site-packages/torch/distributed/checkpoint/utils.py\", line 160, in all_reduce\n    local_data = map_fun()\nFileNotFoundError: [Errno 2] No such file or directory: '/ckpt/step-100/.metadata'",LIB)})
known("user_code",logs={"rank0":PROGRESS+"\n"+T("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",LIB)})
known("port_in_use",logs={"rank0":"[W1115 10:00:00 socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n[E1115 10:00:00 socket.cpp:500] [c10d] The server socket has failed to listen on any local network address.\n"+T("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",LIB),"rank1":T("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (node1, 29500).",LIB)})
known("queue_wait",pods=[pod(phase="Pending",node="",conditions=[{"type":"PodScheduled","status":"False","reason":"SchedulingGated","message":"Scheduling is blocked due to non-empty scheduling gates"}])])
known("queue_wait",events=[event("Unschedulable","queue resource quota insufficient","train-pg","PodGroup",type="Normal"),event("Unschedulable","0/0 tasks in gang unschedulable: pod group is not ready, 4 minAvailable","train-pg","PodGroup")])
known("efa_unavailable",pods=[pod(phase="Pending",node="")],events=[event("FailedScheduling","0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa. preemption: 0/4 nodes are available: 4 No preemption victims found for incoming pod.")])
known("cpu_memory_request",pods=[pod(phase="Pending",node="",conditions=[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/10 nodes are available: 2 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 8 Insufficient memory."}])])
known("gpu_unavailable",pods=[pod(phase="Pending",node="")],events=[event("NotTriggerScaleUp","pod didn't trigger scale-up: 1 max node group size reached, 2 Insufficient nvidia.com/gpu"),event("FailedScheduling","0/6 nodes are available: 6 Insufficient nvidia.com/gpu.")])
OWN_ERROR = T("ValueError: bad reward",MINE)
known("user_code",pods=[pod(phase="Failed",state={"terminated":{"exitCode":1,"reason":"Error","message": OWN_ERROR,"finishedAt":"2026-11-15T10:06:00Z"}})])
known("user_import",job={"metadata":{"name":"r"},"status":{"jobStatus":"FAILED","jobDeploymentStatus":"Failed","message":"Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n"+T("ModuleNotFoundError: No module named 'vllm'",MINE)}})
known("cuda_oom",logs={"rank3-error":json.dumps({"message":{"message":"OutOfMemoryError: CUDA out of memory.","extraInfo":{"py_callstack":T("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",LIB),"timestamp":"1763200000"}}})})
known("disk_full",logs={"rank0":"\n".join(json.dumps(x) for x in [{"time":"2026-11-15T10:00:00Z","level":"info","msg":"step 1 loss 2"},{"time":"2026-11-15T10:01:00Z","level":"error","msg":"checkpoint failed","exc_info":T("OSError: [Errno 28] No space left on device",MINE)}])})
known("gpu_count",slurm={"scontrol":"JobId=7 JobName=x\n   JobState=FAILED Reason=NonZeroExitCode\n   ExitCode=1:0\n   TRES=cpu=4,mem=16G,node=1,billing=4"},logs={"slurm-7.out":T("RuntimeError: No CUDA GPUs are available",LIB)})
known("user_code",logs={"rank0":PROGRESS+"\n"+T("RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",LIB),"kernel":"NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."})
# containers under Slurm: what enroot or apptainer says decides, not the plugin's last words
pyxis("container_start")
pyxis("gpu_runtime","nvidia-container-cli: mount error: file creation failed: /raid/enroot-data/run/nvidia-persistenced/socket: no such device or address","[ERROR] /etc/enroot/hooks.d/98-nvidia.sh exited with return code 1")
pyxis("gpu_runtime","[ERROR] Command not found: nvidia-container-cli, see https://github.com/NVIDIA/libnvidia-container")
pyxis("container_start","enroot-switchroot: failed to execute: /bin/sh: No such file or directory")
pyxis("container_start","mkdir: cannot create directory '/run/enroot': Permission denied")
pyxis("mount_failed","enroot-mount: failed to mount: /home/a/coco at /tmp/enroot-data/user-0/pyxis_1/data: Permission denied")
pyxis("image_missing","[ERROR] No such file or directory: /shared/images/train.sqsh")
pyxis("image_missing","[INFO] Fetching image manifest list","[ERROR] URL https://nvcr.io/v2/nvidia/pytorch/manifests/99.01-py3 returned error code: 404 Not Found")
pyxis("image_auth","[ERROR] URL https://registry-1.docker.io/v2/library/foo/manifests/latest returned error code: 401 Unauthorized")
printed("image_missing","FATAL:   could not open image /scratch/train.sif: failed to retrieve path for /scratch/train.sif: lstat /scratch/train.sif: no such file or directory",pre="")
printed("container_start",'FATAL:   "torchrunn": executable file not found in $PATH',pre="")
printed("mount_failed","FATAL:   container creation failed: mount hook function failure: mount /mmfs1->/mmfs1 error: while mounting /mmfs1: destination /mmfs1 doesn't exist in container",pre="")
printed("node_lost","srun: error: Task launch for StepId=96.0 failed on node n1: Socket timed out on send/recv operation","srun: Job step aborted",pre="")
# ranks that a signal ended, by launcher
DEEPSPEED = "[2026-07-19 10:43:21,982] [ERROR] [launch.py:321:sigkill_handler] ['/opt/conda/bin/python', '-u', 'train.py', "+"'--flag', "*150+"'--deepspeed'] exits with return code = "
for signal, name in {9: "host_oom", 11: "segfault", 7: "shm"}.items():
    printed(name,f"{DEEPSPEED}-{signal}")
    printed(name,f"mpirun noticed that process rank 7 with PID 0 on node gpu-{'x' * 60} exited on signal {signal} (x).")
    printed(name,"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",f"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: x (signal {signal})")
printed("host_oom","/var/spool/slurm/job474687/slurm_script: line 31:  6521 Killed                  singularity exec --nv pytorch.sif python train.py")
printed("segfault","train.sh: line 12: 77 Segmentation fault      (core dumped) python train.py")
# services
raised("file_system","torch._inductor.exc.InductorError: OSError: [Errno 116] Stale file handle: '/root/.triton/cache/ABC/cuda_utils.so'",LIB)
raised("cuda_oom","ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB).",LIB)
INTERNAL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, internal error - please report this issue to the NCCL developers, NCCL version 2.27.3\nncclInternalError: Internal check failed."
raised("nccl_efa",INTERNAL,pre="n1:1:2 [1] accept_wait_for_connection:4909 NCCL WARN NET/OFI Unexpected number of remote rails for dev 3. Expected 4 but got 2")
raised("hub_missing","requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://huggingface.co/org/m/resolve/step-12000/config.json",HF)
raised("user_arguments","huggingface_hub.errors.HfHubHTTPError: 409 Client Error: Conflict for url: https://huggingface.co/api/repos/create (Request ID: x)\n\nYou already created this model repo",HF)
raised("checkpoint_mismatch","megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded (torch.Size([1024, 768])) and expected ((512, 768)) tensor for key model.embedding.weight",LIB)
raised("node_lost","ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\nThe actor is dead because its node has died. Node Id: 677df2",LIB)
raised("store_transient","wandb.errors.UsageError: Error communicating with wandb process\nFor more info see: https://docs.wandb.ai/library/init#init-start-error",LIB)
raised("store_access","wandb.errors.CommError: It appears that you do not have permission to access the requested resource. Please reach out to the project owner to grant you access.",LIB)
raised("user_code","KeyError: 'labels'",'  File "/workspace/train.py", line 96, in <module>\n    for batch in loader:\n  File "/workspace/collate.py", line 31, in __call__\n    labels = torch.stack([s["labels"] for s in samples])\n')
# a worker that runs again: for a job that failed it is the cause, unless the program says another
OOM_BEFORE = [pod(state={"running": {}})]
OOM_BEFORE[0]["status"]["containerStatuses"][0]["lastState"] = exited(137, "OOMKilled")
RAY_FAILED = {"metadata": {"name": "r"}, "status": {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "Job entrypoint command failed with exit code 1"}}
known("host_oom",job=RAY_FAILED,pods=OOM_BEFORE)
known("user_code",job=RAY_FAILED,pods=OOM_BEFORE,logs={"driver":OWN_ERROR})
known("running",job={"metadata":{"name":"r"},"status":{"jobStatus":"RUNNING","jobDeploymentStatus":"Running"}},pods=OOM_BEFORE)
# fmt: on


@pytest.mark.parametrize(("name", "facts"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)])
def test_wording(name, facts):
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == name, verdict.as_dict()
