"""The user's own code, arguments and data; numbers that are none."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import line, raised

NAN = r"\b(?:nan|inf|infinite|non-?finite|not finite|diverged|divergence)\b"

RULES = (
    raised("nan", r"(?:\w+\.)*(?:FloatingPointError|NanError|NaNLossError|LossIsNaN\w*|NonFinite\w*|Diverge\w*"
            r"|TrainingDiverged\w*|NanDetected\w*)"),
    raised("nan", None, rf"(?:loss|grad\w*|norm|logits|activation|weights?|parameters?|values?).{{0,80}}{NAN}"
            rf"|{NAN}.{{0,60}}(?:loss|grad|value|logits|parameter)|returned nan values"
            rf"|loss scale (?:already )?(?:at|reached|below) (?:the )?minimum|inf checks|probability tensor contains"),
    raised("user_arguments", r"(?:\w+\.)*(?:ConfigAttributeError|ConfigKeyError|MissingConfigException"
            r"|MissingMandatoryValue|ConfigCompositionException|OverrideParseException|InterpolationKeyError"
            r"|ArgumentError|UsageError|BadParameter|NoSuchOption|HfArgumentParser\w*|ScannerError|ParserError"
            r"|ConfigError|ConfigurationError|UserError|ConfigTypeError|UnsupportedInterpolationType|HydraException"
            r"|MissingParameter|TOMLDecodeError|DeepSpeedConfigError|MisconfigurationException"
            r"|InstantiationException|BadArgumentUsage|UnrecognizedFlagError|IllegalFlagValueError|FlagsError)"),
    raised("user_data", r"(?:\w+\.)*(?:UnicodeDecodeError|JSONDecodeError|UnidentifiedImageError|ArrowInvalid"
            r"|EmptyDataError|DataError|DatasetGenerationError|CastError|ArrowTypeError|ParquetException"
            r"|DecompressionBombError|LZMAError|TarError|ReadError|BadGzipFile|CSVError|SchemaInferenceError"
            r"|LibsndfileError|NoBackendError|BadZipFile|EmptyDatasetError|DataFilesNotFoundError"
            r"|NonMatchingSplitsSizesError|ExpectedMoreSplits\w*)"),
    raised("user_import", r"(?:\w+\.)*ModuleNotFoundError|(?:\w+\.)*ImportError"),
    raised("user_data", r"(?:\w+\.)*(?:ValueError|RuntimeError|IndexError|KeyError|TypeError|AssertionError|OSError"
            r"|StopIteration|Exception|PIL\.\w+)", r"num_samples should be a positive"
            r"|stack expects each tensor to be equal size|^index out of range in self|Target -?\d+ is out of bounds"
            r"|image file is truncated|broken data stream|cannot identify image|empty (?:dataset|data|file|shard)"
            r"|dataset (?:is )?empty|no (?:samples|data files|records|examples|training (?:data|examples))"
            r"|token ids?.{0,40}(?:out of|larger|exceed|>=)|malformed (?:record|line|row|json)|(?:bad|corrupt(?:ed)?"
            r"|invalid|malformed|broken) (?:record|sample|row|line|image|example|document|utf|json|shard)|(?:record"
            r"|sample|row|document|example) .{0,40}(?:is (?:empty|corrupt|malformed|invalid)|has no|missing)"
            r"|invalid literal for int|could not convert string to float|label \S+ (?:is )?out of (?:range|bounds)"
            r"|column names? .{0,80}(?:not|don't)|Column .{0,40}not in the dataset"
            r"|unable to create tensor, you should probably activate truncation|Invalid data|vocab_size"),
    raised("user_data", r"(?:\w+\.)*(?:KeyError|IndexError|ValueError|TypeError|StopIteration|AttributeError"
            r"|AssertionError|EOFError|RuntimeError|ZeroDivisionError)",
            frames=r"collate|__getitem__|dataset|data_loader|dataloader|tokenize|preprocess|/data/|json\.loads"
            r"|read_record|parse_row", confidence=0.6),
    raised("user_code", r"(?:\w+\.)*(?:RuntimeError|Exception)",
            r"mat1 and mat2 shapes|size of tensor a|expected scalar type"
            r"|Expected all tensors to be on the same device|same device|one of the variables needed for gradient"
            r"|does not require grad|Expected to have finished reduction|shape '\[|Sizes of tensors must match"
            r"|Given groups|inplace operation|backward through the graph a second time|expected .{0,40} to have"
            r"|not implemented for|Input type|element 0 of tensors|should be the same|start a new process before"
            r"|dtype|shapes? ", confidence=0.85),
    raised("user_arguments", r"(?:\w+\.)*ValidationError|(?:\w+\.)*FileNotFoundError|(?:\w+\.)*NotADirectoryError"
            r"|(?:\w+\.)*IsADirectoryError|(?:\w+\.)*PermissionError|(?:\w+\.)*FileExistsError", confidence=0.65),
    raised("user_arguments", r"(?:\w+\.)*(?:ValueError|TypeError|RuntimeError|AssertionError|KeyError|Exception"
            r"|AttributeError|NotImplementedError|SystemExit|click\.\w+)",
            r"^(?:unknown|unrecognized|unsupported|invalid) (?:argument|option|config|optimizer|scheduler|model"
            r"|flag|setting|value for|choice|parameter|dtype|precision|strategy|backend)"
            r"|(?:Arguments|Config)\S*__init__\(\) got an unexpected keyword"
            r"|arguments are not used by the HfArgumentParser|must be divisible by|is not divisible"
            r"|not (?:a )?multiple of|batch.?size.{0,80}(?:divisible|must|should|positive)"
            r"|config\w*.{0,60}(?:missing|invalid|required|must|should|expected|not)"
            r"|argument.{0,40}(?:must|should|required|invalid)|(?:learning.?rate|lr|num_\w+|micro_batch\w*"
            r"|world.?size|tensor.?parallel\w*|pipeline\w*|tp_size).{0,60}(?:must|should|divisible|invalid|not equal"
            r"|does not|cannot)|--\w+.{0,60}(?:must|required|should|invalid|expected)|(?:Expected|expected) one of"
            r"|is not a valid (?:choice|option)|requires? --|mutually exclusive|environment variable"
            r"|could not interpret|mixed precision requires|both .{0,60} cannot be", confidence=0.65),
    raised("segfault", r"(?:\w+\.)*(?:SegmentationFault)"),
    raised("user_code", r"(?:\w+\.)*(?:SyntaxError|IndentationError|TabError|NameError|UnboundLocalError"
            r"|ZeroDivisionError|RecursionError|NotImplementedError)", confidence=0.9),
    raised("user_code", r"(?:\w+\.)*(?:TypeError|AttributeError|KeyError|IndexError|ValueError|AssertionError"
            r"|Unsupported|InternalTorchDynamoError|BackendCompilerFailed|LoweringException|ReferenceError"
            r"|LookupError|OverflowError)", confidence=0.8),
    line("user_arguments", r"Flags parsing error|In '\S+': Could not find '"
            r"|\S{1,200}: error: (?:unrecognized arguments|the following arguments are required"
            r"|argument |ambiguous option|one of the arguments|too few arguments|expected|invalid choice"
            r"|.{0,40}required)|Error: (?:No such option|Invalid value|Missing (?:option|argument|parameter)"
            r"|Got unexpected)|No such option: |Could not override|Key '\S+' (?:is )?not in|error: (?:run file"
            r"|unknown key|\S+ is not a key)", confidence=0.9),
    line("nan", rf"(?:fatal: |error: )?(?:training )?(?:loss|grad\w* norm|gradient\w*)\b.{{0,60}}(?:is|became|was|="
            rf"|:|are) ?{NAN}.{{0,80}}(?:stop|abort|exit|halt|terminat|quit)|.{{0,20}}(?:nan|NaN"
            rf"|non-finite).{{0,40}}(?:detected|encountered|loss).{{0,80}}(?:stop|abort|exit|halt|terminat)"
            rf"|Loss is (?:nan|inf)", confidence=0.85),
    line("segfault", r"Segmentation fault(?: \(core dumped\))?|Fatal Python error: (?:Segmentation fault|Aborted"
            r"|Illegal instruction)|\S{0,120}line \d+: +\d+ (?:Segmentation fault|Aborted|Illegal instruction)"
            r"|.{0,40}Signal: Segmentation fault|free\(\): invalid|double free or corruption|malloc\(\): "
            r"|munmap_chunk\(\)|corrupted (?:size|double)|Aborted \(core dumped\)"
            r"|srun: error: \S+: tasks?.{0,60}: (?:Segmentation fault|Aborted)|!+ ?Segfault encountered",
            confidence=0.8, strength=24),
)  # fmt: skip
