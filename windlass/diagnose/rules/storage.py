"""Disks, file systems, checkpoints, the model hub and object stores."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, near, node, raised, refusal

OS = (
    r"(?:\w+\.)*(?:OSError|IOError|FileNotFoundError|BlockingIOError|RuntimeError|SafetensorError|Error"
    r"|ArrowInvalid|Exception|CheckpointException|InternalTorchDynamoError|sqlite3\.OperationalError"
    r"|OperationalError|ENOSPC|HDF5\w*|UserError|StorageError|ConnectionAbortedError)"
)  # fmt: skip
HUB = r"huggingface|hf\.co|the Hub|\bhub\b|hf_hub|modelscope"
HUB_FRAMES = r"huggingface_hub|transformers/|datasets/|from_pretrained|load_dataset|snapshot_download|modelscope"
STORE = (
    r"s3|bucket|gs://|gcs|googleapis|amazonaws|blob\.core|PutObject|GetObject|HeadObject|UploadPart|ListObjects"
    r"|CreateMultipart"
)  # fmt: skip
STORE_FRAMES = r"boto|s3fs|gcsfs|google/cloud|fsspec|s3torch|aiobotocore|azure|smart_open|s3transfer"
HTTP = (
    r"(?:\w+\.)*(?:HTTPError|HfHubHTTPError|HTTPStatusError|ConnectionError|ConnectTimeout|ReadTimeout|Timeout"
    r"|MaxRetryError|NewConnectionError|ProxyError|SSLError|ChunkedEncodingError|ClientConnectorError|OSError"
    r"|LocalEntryNotFoundError|ProtocolError|RemoteDisconnected|EnvironmentError|NameResolutionError|ClientError"
    r"|RuntimeError|ReadTimeoutError|ConnectError|TimeoutError|ServerDisconnectedError|ClientResponseError"
    r"|ClientPayloadError|IncompleteRead)"
)  # fmt: skip

RULES = (
    # the hub
    raised("clock_skew", None, r"RequestTimeTooSkewed|certificate is not yet valid|used before issued"
            r"|issued in the future|is now earlier than|RequestExpired.{0,80}skew"
            r"|clock.{0,30}skew|Signature (?:not yet current|expired)"),
    raised("hub_gated", r"(?:\w+\.)*GatedRepoError"),
    raised("hub_gated", None, r"gated (?:repo|dataset|model)|is gated|restricted.{0,60}authorized list"
            r"|must be authenticated to access|make sure to (?:request|have) access|Please log in"
            r"|need to (?:be )?(?:logged in|authenticate)|(?:401|403) Client Error.{0,200}(?:huggingface|hf\.co)"
            r"|Cannot access gated|Invalid (?:username or password|user token|credentials in Authorization)"
            r"|awaiting a review|private repo.{0,60}(?:access|token)"),
    raised("hub_missing", r"(?:\w+\.)*(?:RepositoryNotFoundError|RevisionNotFoundError|EntryNotFoundError"
            r"|RemoteEntryNotFoundError|DatasetNotFoundError|HFValidationError)",
            test=lambda text: "401" not in text[:200]),
    raised("hub_gated", r"(?:\w+\.)*RepositoryNotFoundError", confidence=0.6),
    raised("hub_rate_limit", HTTP, r"(?:429|50\d) (?:Client|Server) Error|Too Many Requests|status code:? ?(?:429"
            r"|50\d)|rate ?limit", frames=HUB_FRAMES, test=lambda text: True),
    raised("hub_rate_limit", HTTP, rf"(?:{HUB}).{{0,600}}(?:429|50[0234]\b|Read timed out|Too Many|rate.?limit)"
            rf"|(?:429|50[0234]\b|Read timed out|Too Many|rate.?limit).{{0,600}}(?:{HUB})"),
    raised("hub_offline", r"(?:\w+\.)*(?:OfflineModeIsEnabled|LocalEntryNotFoundError)"),
    raised("hub_offline", None, r"couldn't connect to 'https://(?:huggingface|hf)|offline mode is enabled"
            r"|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|HF_DATASETS_OFFLINE|Couldn't reach .{0,200}(?:Hub|hf\.co"
            r"|huggingface|offline)|outgoing traffic has been disabled"
            r"|cannot find the requested files in the (?:local|disk) cache|Cannot find an appropriate cached"),
    raised("hub_offline", HTTP, rf"(?:{HUB}).{{0,600}}(?:Max retries|NewConnectionError|Name or service|resolve"
            rf"|unreachable|refused|timed out|Proxy|No route|SSL)|(?:resolve|unreachable|refused).{{0,300}}(?:{HUB})"),
    raised("hub_rate_limit", r"(?:\w+\.)*(?:ReadTimeout|ReadTimeoutError|ConnectTimeout"
            r"|HfHubHTTPError)", frames=HUB_FRAMES),
    raised("hub_offline", r"(?:\w+\.)*(?:ConnectionError|NewConnectionError|MaxRetryError|ProxyError|ConnectError"
            r"|ClientConnectorError|NameResolutionError)", frames=HUB_FRAMES),
    raised("hub_missing", None, r"is not a local folder and is not a valid model identifier"
            r"|does not appear to have a file named|is not a valid git identifier|doesn't exist on the Hub"
            r"|404 Client Error.{0,200}(?:huggingface|hf\.co)|Can't load (?:tokenizer|config\w*|the \w+"
            r"|feature extractor) for|Entry Not Found|Revision Not Found|Repo id must"
            r"|BuilderConfig .{0,80}not found|Unknown split"),
    # object stores
    raised("store_access", r"(?:\w+\.)*(?:NoCredentialsError|PartialCredentialsError|CredentialRetrievalError"
            r"|DefaultCredentialsError|TokenRetrievalError|UnauthorizedSSOTokenError|ProfileNotFound|RefreshError"
            r"|NoAuthTokenError)"),
    raised("store_access", None, r"(?:AccessDenied|NoSuchBucket|InvalidAccessKeyId|SignatureDoesNotMatch"
            r"|ExpiredToken|InvalidToken|AllAccessDisabled|AccountProblem|PermanentRedirect)"
            r"|Unable to locate credentials|\(403\) when calling|when calling the HeadBucket operation"
            r"|does not have (?:storage\.|serviceusage|permission)|bucket does not exist|The specified bucket"
            r"|403 (?:GET|POST|PUT|HEAD) https://storage|AuthorizationPermissionMismatch|AuthorizationFailure"
            r"|container does not exist|ContainerNotFound|AuthenticationFailed"
            r"|KMS\.\w*(?:Denied|Disabled)"),
    raised("store_transient", r"(?:\w+\.)*(?:EndpointConnectionError|ConnectionClosedError|ReadTimeoutError"
            r"|ResponseStreamingError|IncompleteReadError|ConnectTimeoutError|ServiceUnavailable|TooManyRequests"
            r"|DeadlineExceeded|HTTPClientError|S3Exception|ProtocolError)",
            rf"{STORE}|timeout|timed out|Connection|endpoint|received|expected"),
    raised("store_transient", None, rf"\((?:SlowDown|503|500|InternalError|RequestTimeout|ServiceUnavailable"
            rf"|Throttling\w*|502|504|RequestLimitExceeded)\) when calling|Please reduce your request rate"
            rf"|(?:{STORE}).{{0,300}}(?:Connection (?:reset|was closed|broken|aborted)|timed out|50[0234]\b"
            rf"|Slow ?Down|IncompleteRead)|(?:Connection (?:reset|was closed|broken)|timed out|50[0234]\b"
            rf"|IncompleteRead).{{0,300}}(?:amazonaws|googleapis|s3://|gs://)"),
    raised("store_access", r"(?:\w+\.)*(?:PermissionError|ClientAuthenticationError)", frames=STORE_FRAMES),
    raised("user_arguments", None, r"\(NoSuchKey\)|\(404\) when calling|The specified key does not exist"),
    raised("store_transient", HTTP, r"reset|timed out|broken|closed|50[0234]\b", frames=STORE_FRAMES),
    # some other service over HTTP: not the program's fault, and not the ranks' network
    raised("store_transient", r"(?:requests|urllib3|httpx|httpcore|aiohttp)\.(?:\w+\.)*\w*(?:Connect\w*|Timeout"
            r"|ProtocolError|MaxRetryError)\w*",
            confidence=0.45),
    # disks and file systems
    raised("inodes_full", OS, r"\binodes?\b"),
    raised("disk_full", OS, r"^\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded|StorageFull"
            r"|os error 28|ENOSPC|database or disk is full|PytorchStreamWriter failed|unexpected pos \d+ vs"),
    raised("file_system", OS, r"^\[Errno (?:5|30|107|116|121|112|108|70|103|110)\]|Input/output error"
            r"|Stale (?:NFS )?file handle|Read-only file system|Transport endpoint is not connected"
            r"|Remote I/O error|os error (?:5|30|107|116)\b|Cannot send after transport endpoint|Host is down"
            r"|\[Errno 37\]|unable to lock file"),
    near("inodes_full", "disk_full", r"\b(?:inodes? |IUse%|IFree).{0,60}(?:100%| 0 )|out of inodes"
            r"|no (?:free )?inodes|inodes? (?:exhausted|used up|100)|\b100% /\S+.*inode"),
    # checkpoints
    raised("checkpoint_mismatch", None, r"Error\(s\) in loading state_dict|size mismatch for"
            r"|Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict"
            r"|loaded state dict (?:contains a parameter group|has a different number)"
            r"|Missing key in checkpoint state_dict|(?:shape|size) (?:mismatch|of the param).{0,200}(?:checkpoint"
            r"|saved)|checkpoint.{0,120}(?:does not match|mismatch|different (?:model|world|architecture|config))"),
    raised("checkpoint_damaged", None, r"PytorchStreamReader failed|central directory|invalid load key"
            r"|Error while deserializing header|InvalidHeader|HeaderTooLarge|MetadataIncompleteBuffer"
            r"|HeaderTooSmall|unexpected EOF, expected|(?:checkpoint|shard|\.pt\b|safetensors"
            r"|\.distcp).{0,160}(?:corrupt|truncat|checksum|damaged|incomplete)|(?:corrupt|truncat|checksum"
            r"|damaged).{0,160}(?:checkpoint|\.pt\b|safetensors|\.distcp)|storage has wrong (?:byte )?size"
            r"|file in archive is not in a subdirectory"),
    raised("checkpoint_damaged", r"(?:\w+\.)*(?:UnpicklingError|EOFError|BadZipFile|SafetensorError"
            r"|CheckpointException)", frames=r"torch/serialization|load_checkpoint|safetensors|checkpoint"
            r"|torch\.load|resume"),
    raised("checkpoint_damaged", r"(?:\w+\.)*(?:UnpicklingError|EOFError)",
            r"pickle data was truncated|Ran out of input|load key", confidence=0.75),
    line("disk_full", r"(?:\S+: ){0,4}(?:write error: |error writing .{0,160}: |cannot create .{0,120}: "
            r"|cannot write.{0,80})?No space left on device$|\S{0,80}: write failed.{0,60}(?:disk|file system"
            r"|filesystem).{0,20}full|slurmstepd: error: .{0,160}No space left on device"
            r"|(?:\S+: ){0,3}.{0,80}Disk quota exceeded$"),
    line("file_system", r"(?:\S+: ){0,4}.{0,120}: (?:Stale file handle|Input/output error|Read-only file system"
            r"|Transport endpoint is not connected)$"),
    node("file_system", r"Lustre.{0,200}(?:evicted|lost|timed out)|nfs: server \S+ not responding|EXT4-fs error"
            r"|XFS .{0,60}(?:corruption|shutdown)|ReadonlyFilesystem True|ReadonlyFilesystem=True"),
    refusal("store_access", r"Unable to locate credentials|NoSuchBucket"),
)  # fmt: skip
