"""Disks, file systems, checkpoints, the model hub and object stores."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, near, node, raised, refusal

OS = r"""
    OSError|IOError|FileNotFoundError|BlockingIOError|RuntimeError|SafetensorError|Error|ArrowInvalid|Exception
    CheckpointException|InternalTorchDynamoError|InductorError|OperationalError|ENOSPC|HDF5\w*|UserError|StorageError
    ConnectionAbortedError|TimeoutError|ConnectionResetError|XetError|NotADirectoryError|PermissionError"""
HUB = r"huggingface|hf\.co|the Hub|\bhub\b|hf_hub|modelscope"
HUB_FRAMES = r"huggingface_hub|transformers/|datasets/|from_pretrained|load_dataset|snapshot_download|modelscope"
STORE = (
    r"s3|bucket|gs://|gcs|googleapis|amazonaws|blob\.core|(?:Put|Get|Head)Object|UploadPart|ListObjects|CreateMultipart"
)
STORE_FRAMES = (
    r"boto|s3fs|gcsfs|google/cloud|fsspec|s3torch|aiobotocore|azure|smart_open|s3transfer|cloudpathlib|streaming"
    r"|litdata"
)
HTTP = r"""
    HTTPError|HfHubHTTPError|HTTPStatusError|ConnectionError|ConnectTimeout|ReadTimeout|Timeout|MaxRetryError
    NewConnectionError|ProxyError|SSLError|ChunkedEncodingError|ClientConnectorError|OSError|LocalEntryNotFoundError
    ProtocolError|RemoteDisconnected|EnvironmentError|NameResolutionError|ClientError|RuntimeError|ReadTimeoutError
    ConnectError|TimeoutError|ServerDisconnectedError|ClientResponseError|ClientPayloadError|IncompleteRead|ReadError
    RemoteProtocolError|ConnectionResetError|ClientOSError|ContentTypeError|FileNotFoundError|gaierror|URLError"""
TRACKER = r"wandb\.(?:\w+\.)*\w+Error|(?:\w+\.)*MlflowException"
UNREACHED = (
    r"Max retries|NewConnectionError|Name or service|(?<!/)resolve|unreachable|refused|timed out|Proxy|No route|SSL"
)
BUSY = r"429|50[0234]\b|Read timed out|Too Many|rate.?limit|Gateway Time|Service Unavailable|Internal Server Error"

RULES = (
    raised("clock_skew", None, r"""
        RequestTimeTooSkewed|certificate is not yet valid|used (?:before issued|too early)|issued in the future
        is now earlier than|RequestExpired.{0,80}skew|clock.{0,30}skew|Signature (?:not yet current|expired)
        difference between the request time and the current time is too large|not valid yet|before its "?nbf"""),
    # the hub
    raised("hub_gated", r"GatedRepoError|LocalTokenNotFoundError"),
    raised("hub_gated", None, r"""
        gated (?:repo|dataset|model)|is gated|restricted.{0,60}authorized list|must be authenticated to access
        make sure to (?:request|have) access|need to (?:be )?(?:logged in|authenticate)|Cannot access gated
        (?:401|403) (?:Client Error|Forbidden|Unauthorized).{0,300}(?:huggingface|hf\.co)|awaiting a review
        Invalid (?:username or password|user token|credentials in Authorization)|private repo.{0,60}(?:access|token)
        Access to (?:model|dataset) \S+ is restricted|token .{0,60}(?:required|invalid).{0,100}hugging
        huggingface-cli login|hf auth login""",
        test=lambda text: "404 Client Error" not in text and "is not a local folder" not in text),
    raised("hub_missing", r"""
        RepositoryNotFoundError|RevisionNotFoundError|EntryNotFoundError|RemoteEntryNotFoundError|HFValidationError
        DatasetNotFoundError|DisabledRepoError""", test=lambda text: "401" not in text[:200]),
    raised("hub_gated", r"RepositoryNotFoundError", confidence=0.6),
    raised("user_arguments", r"HfHubHTTPError|BadRequestError", r"4(?:00|09|13|22) Client Error|Bad request"),
    raised("hub_rate_limit", HTTP, r"""
        (?:429|50\d) (?:Client|Server) Error|Too Many Requests|status code:? ?(?:429|50\d)|rate.?limit""",
        frames=HUB_FRAMES),
    raised("hub_rate_limit", HTTP, rf"""
        (?:{HUB}).{{0,600}}(?:{BUSY})|(?:{BUSY}).{{0,600}}(?:{HUB})|Consistency check failed: file should be of size
        CAS service error|xet.{{0,80}}(?:error|failed)|We had to rate limit"""),
    raised("hub_offline", r"OfflineModeIsEnabled|LocalEntryNotFoundError"),
    raised("hub_offline", None, r"""
        couldn't connect to 'https://(?:huggingface|hf)|offline mode is enabled|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE
        HF_DATASETS_OFFLINE|Couldn't reach .{0,200}(?:Hub|hf\.co|huggingface|offline)
        Cannot find an appropriate cached|outgoing traffic has been disabled
        find the requested files in the (?:local|disk) cache"""),
    raised("hub_offline", HTTP, rf"(?:{HUB}).{{0,600}}(?:{UNREACHED})|(?:{UNREACHED}).{{0,300}}(?:{HUB})"),
    raised("hub_rate_limit", r"ReadTimeout|ReadTimeoutError|ConnectTimeout|HfHubHTTPError", frames=HUB_FRAMES),
    raised("hub_offline", r"""
        ConnectionError|NewConnectionError|MaxRetryError|ProxyError|ConnectError|ClientConnectorError
        NameResolutionError""", frames=HUB_FRAMES),
    raised("hub_missing", None, r"""
        is not a local folder and is not a valid model identifier|does not appear to have a file named
        is not a valid git identifier|doesn't exist on the Hub
        404 (?:Client Error|Not Found).{0,200}(?:huggingface|hf\.co)|Can't load (?:the )?(?:\w+ ){1,2}(?:for|of) '
        Entry Not Found|Revision Not Found|Repo id must|BuilderConfig .{0,80}not found|Unknown split
        Couldn't find a dataset script|no file named (?:pytorch_model|model)"""),
    # object stores
    raised("quota", None, r"""
        VcpuLimitExceeded|vCPU (?:capacity|limit)|InstanceLimitExceeded|ResourceLimitExceeded|service limit
        QUOTA_EXCEEDED|Quota '\S+' exceeded|exceed\w* (?:approved|quota)|LimitExceededException"""),
    raised("cloud_capacity", None, r"""
        Insufficient\w*Capacity|sufficient capacity|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|AllocationFailed
        enough resources available to fulfill|Unable to provision requested ML compute capacity|stockout"""),
    raised("cloud_capacity", r"ResourcesUnavailableError|CapacityError"),
    raised("store_access", r"""
        NoCredentialsError|PartialCredentialsError|CredentialRetrievalError|DefaultCredentialsError
        TokenRetrievalError|UnauthorizedSSOTokenError|ProfileNotFound|RefreshError|NoAuthTokenError|SSOTokenLoadError
        """),
    raised("store_access", None, r"""
        AccessDenied|Access Denied|ACCESS_DENIED|NoSuchBucket|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken
        InvalidToken|AllAccessDisabled|AccountProblem|PermanentRedirect|Unable to locate credentials
        \(403\) when calling|when calling the HeadBucket operation|does not have (?:storage\.|serviceusage|permission)
        bucket does not exist|The specified bucket|403 (?:GET|POST|PUT|HEAD) https://storage|AuthorizationFailure
        AuthorizationPermissionMismatch|container does not exist|ContainerNotFound|AuthenticationFailed
        KMS\.\w*(?:Denied|Disabled)|No signing credentials|Client error: Forbidden|not authorized to perform: s3
        Anonymous caller|Invalid bucket name"""),
    raised("user_arguments", None, r"\(NoSuchKey\)|\(404\) when calling|The specified key does not exist"),
    raised("store_transient", r"""
        EndpointConnectionError|ConnectionClosedError|ResponseStreamingError|IncompleteReadError|ConnectTimeoutError
        ServiceUnavailable|TooManyRequests|HTTPClientError|S3Exception|google\.\S*DeadlineExceeded
        botocore\S*Timeout\w*|GatewayTimeout|InternalServerError|RetryError|ServiceResponseError|ServiceRequestError
        """),
    raised("store_transient", None, rf"""
        \((?:SlowDown|50[0234]|InternalError|RequestTimeout|Throttling\w*|RequestLimit\w*)\) when calling
        \(ServiceUnavailable\) when calling|reduce your request rate
        AWS Error (?:SLOW_DOWN|NETWORK_CONNECTION|SERVICE_UNAVAILABLE|INTERNAL)
        (?:{STORE}).{{0,300}}(?:Connection (?:reset|was closed|broken|aborted)|timed out|50[0234]\b|Slow ?Down)
        (?:Connection (?:reset|was closed|broken)|timed out|50[0234]\b|IncompleteRead).{{0,300}}(?:amazonaws|googleapis)
        (?:Connection (?:reset|was closed|broken)|timed out).{{0,300}}(?:s3|gs)://"""),
    raised("store_access", r"PermissionError|ClientAuthenticationError|Forbidden", frames=STORE_FRAMES),
    raised("store_access", None, r"(?:Object|Bucket|s3://|gs://)\S* .{0,80}not found", confidence=0.7,
           frames=STORE_FRAMES),
    raised("store_transient", r"FSTimeoutError"),
    raised("store_transient", None, r"took too long to download|failed to download", confidence=0.7,
           frames=STORE_FRAMES),
    raised("store_transient", OS, r"(?:aws s3|gsutil|s5cmd|gcloud storage|azcopy) .{0,300}exit", confidence=0.7),
    raised("store_transient", HTTP, r"reset|timed out|broken|closed|50[0234]\b", frames=STORE_FRAMES),
    # disks and file systems
    raised("inodes_full", OS, r"\binodes?\b"),
    raised("disk_full", None, r"""
        ^\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded|StorageFull|os error 28|\bENOSPC\b
        \bEDQUOT\b|database or disk is full|PytorchStreamWriter failed|unexpected pos \d+ vs
        Not enough (?:free )?disk space|iostream error|not enough space on the disk"""),
    raised("file_system", OS, r"""
        ^\[Errno (?:5|30|61|70|74|103|107|108|112|116|117|121)\]|Input/output error|Stale (?:NFS )?file handle
        Read-only file system|Transport endpoint is not connected|Remote I/O error|os error (?:5|30|107|116)\b
        Cannot send after transport endpoint|Host is down|\[Errno 37\]|unable to lock file|Structure needs cleaning
        ^\[Errno 110\] Connection timed out: '/"""),
    raised("file_system", OS, r"^\[Errno 16\].{0,80}\.nfs", confidence=0.6),  # also at the end of runs that succeed
    near("inodes_full", "disk_full", r"""
        \b(?:inodes? |IUse%|IFree).{0,60}(?:100%| 0 )|out of inodes|no (?:free )?inodes
        inodes? (?:exhausted|used up|100)|\b100% /\S+.*inode|^/?\S+ +(\d+) +\1 +0 +100%"""),
    # checkpoints
    raised("user_code", None, r"Weights only load failed|WeightsUnpickler error|weights_only", confidence=0.8),
    raised("checkpoint_mismatch", None, r"""
        Error\(s\) in loading state_dict|size mismatch for|(?:Missing|Unexpected) key\(s\) in state_dict
        loaded state dict (?:contains a parameter group|has a different number)|Missing key in checkpoint state_dict
        (?:shape|size) (?:mismatch|of the param).{0,200}(?:checkpoint|saved)|Trying to set a tensor of shape
        checkpoint.{0,120}(?:does not match|mismatch|different (?:model|world|architecture|config))
        value from checkpoint .{0,60}not equal|checkpoint being loaded used a DP world size|ignore_mismatched_sizes
        (?:shapes?|sizes?) .{0,80}(?:do not|does not|doesn't) match.{0,80}checkpoint
        shape mismatch for loaded"""),
    raised("checkpoint_damaged", None, r"""
        PytorchStreamReader failed|central directory|invalid load key|InvalidHeader|HeaderToo|MetadataIncompleteBuffer
        Error while deserializing|unexpected EOF
        (?:checkpoint|shard|\.pt\b|safetensors|\.distcp).{0,160}(?:corrupt|truncat)
        (?:checkpoint|shard|\.pt\b|safetensors|\.distcp).{0,160}(?:checksum|damaged|incomplete|not fully covered)
        (?:corrupt|truncat|checksum|damaged).{0,160}(?:checkpoint|\.pt\b|safetensors|\.distcp|file\?)
        storage has wrong (?:byte )?size|file in archive is not in a subdirectory|No such file.{0,160}/\.metadata'
        invalid magic number|pickle data was truncated"""),
    raised("checkpoint_damaged", r"UnpicklingError|EOFError|BadZipFile|SafetensorError|CheckpointException",
           frames=r"torch/serialization|load_checkpoint|safetensors|checkpoint|torch\.load|resume"),
    raised("checkpoint_damaged", r"UnpicklingError|EOFError", r"Ran out of input|load key", confidence=0.75),
    line("disk_full", r"""
        (?:\S+: ){0,4}(?:write error: |error writing .{0,160}: |cannot create .{0,120}: |cannot write.{0,80})?No space
        \S{0,80}: write failed.{0,60}(?:disk|file ?system).{0,20}full
        slurmstepd: error: (?!.{0,120}/sys/fs/cgroup/).{0,160}No space left on device
        (?:\S+: ){0,3}.{0,80}Disk quota exceeded$"""),
    line("file_system", r"""
        (?:\S+: ){0,4}.{0,120}: (?:Stale file handle|Input/output error|Read-only file system)$
        (?:\S+: ){0,4}.{0,120}: (?:Transport endpoint is not connected)$"""),
    node("file_system", r"""
        Lustre.{0,200}(?:evicted|lost|timed out)|nfs: server \S+ not responding|EXT4-fs error
        ReadonlyFilesystem=? ?True|XFS .{0,60}(?:corruption|shutdown)|blk_update_request: I/O error|StorageReady=False
        """),
    refusal("store_access", r"Unable to locate credentials|NoSuchBucket"),
    # a tracker of experiments
    raised("store_access", TRACKER, r"returned error 40[13]|permission to access the requested resource"),
    raised("store_transient", TRACKER, r"""
        returned error 50\d|Run initialization has timed out|communicat\w+ with (?:wandb|backend)
        API request to .{0,200} failed""", confidence=0.6),
    # some other service over HTTP: not the program's fault, and not the ranks' network
    raised("store_transient", r"""
        (?:requests|urllib3|httpx|httpcore|aiohttp)\.(?:\w+\.)*\w*(?:Connect\w*|Timeout|ProtocolError|MaxRetryError)\w*
        """, confidence=0.45),
)  # fmt: skip
