"""The user's own code, arguments and data; numbers that are none."""

from __future__ import annotations

from windlass.diagnose.rules.shapes import by_launcher, line, raised

NAN = r"\b(?:nan|inf|infinite|infinity|non-?finite|not finite|diverged|divergence)\b"
ARGPARSE = r"(?!slurmstepd|srun)\S{1,200}: error: "  # a program's own usage, not what Slurm says of its plugins
STOPS = r"(?:stop|abort|exit|halt|terminat|quit)"
PLAIN = r"""
    ValueError|RuntimeError|IndexError|KeyError|TypeError|AssertionError|OSError|StopIteration|Exception|PIL\.\w+
    AttributeError|NotImplementedError|SystemExit|click\.\w+|ZeroDivisionError|EOFError"""

RULES = (
    raised("nan", r"""
        FloatingPointError|Na[nN]\w*(?:Error|Exception|Detected)\w*|LossIsNaN\w*|NonFinite\w*|\w*Diverge\w*"""),
    raised("nan", None, rf"""
        (?:loss|grad\w*|norm|logits|activation|weights?|parameters?|values?).{{0,80}}{NAN}|returned nan values
        {NAN}.{{0,60}}(?:loss|grad|value|logits|parameter)|inf checks|probability tensor contains
        loss scale (?:already )?(?:at|reached|below) (?:the )?minimum|loss (?:exploded|spiked|diverg)"""),
    raised("user_arguments", r"""
        ConfigAttributeError|ConfigKeyError|MissingConfigException|MissingMandatoryValue|ConfigCompositionException
        OverrideParseException|InterpolationKeyError|ArgumentError|UsageError|BadParameter|NoSuchOption|ConfigError
        HfArgumentParser\w*|ScannerError|ParserError|ConfigurationError|UserError|ConfigTypeError|HydraException
        UnsupportedInterpolationType|MissingParameter|TOMLDecodeError|DeepSpeedConfigError|MisconfigurationException
        InstantiationException|BadArgumentUsage|UnrecognizedFlagError|IllegalFlagValueError|FlagsError|ValidationError
        ArgumentTypeError|GridSamplingException|StrictDataclass\w*"""),
    raised("user_data", r"""
        UnicodeDecodeError|JSONDecodeError|UnidentifiedImageError|ArrowInvalid|EmptyDataError|DataError|ArrowTypeError
        DatasetGenerationError|CastError|ParquetException|DecompressionBombError|LZMAError|TarError|BadGzipFile
        CSVError|SchemaInferenceError|LibsndfileError|NoBackendError|BadZipFile|EmptyDatasetError
        DataFilesNotFoundError|ReadError|NonMatchingSplitsSizesError|ExpectedMoreSplits\w*|ArrowIndexError
        ComputeError|ArrowNotImplementedError"""),
    raised("user_import", r"ModuleNotFoundError|ImportError"),
    raised("user_data", PLAIN, r"""
        num_samples should be a positive|stack expects each tensor to be equal size|^index out of range in self
        Target -?\d+ is out of bounds|image file is truncated|broken data stream|cannot identify image|Invalid data
        empty (?:dataset|data|file|shard)|dataset (?:is )?empty|invalid literal for int
        could not convert string to float|no (?:samples|data files|records|examples|training (?:data|examples))
        malformed (?:record|line|row|json)|token ids?.{0,40}(?:out of|larger|exceed|>=)
        label \S+ (?:is )?out of (?:range|bounds)|vocab_size
        (?:bad|corrupt(?:ed)?|invalid|malformed|broken) (?:record|sample|row|line|image|example|document|utf|json|shard)
        (?:record|sample|row|document|example) .{0,40}(?:is (?:empty|corrupt|malformed|invalid)|has no|missing)
        column names? .{0,80}(?:not|don't)|Column .{0,40}not in the dataset|should probably activate truncation
        Expected (?:object|value|a?n? ?array) .{0,60}json|inhomogeneous shape|Unable to allocate output buffer"""),
    raised("user_data", r"KeyError|IndexError|ValueError|TypeError", r"in DataLoader worker process", confidence=0.7),
    raised("user_data", PLAIN, frames=r"""
        __getitem__|dataset|data_loader|dataloader|tokenize|preprocess|/data/|json\.loads|read_record
        parse_row""",
        confidence=0.6),
    raised("user_code", r"RuntimeError|Exception", r"""
        mat1 and mat2 shapes|size of tensor a|expected scalar type|same device
        one of the variables needed for gradient|does not require grad|Expected to have finished reduction|shape '\[
        Sizes of tensors must match|Given groups|inplace operation|backward through the graph a second time
        expected .{0,40} to have|not implemented for|Input type|element 0 of tensors|should be the same
        start a new process before|dtype|shapes? |re-?initialize CUDA in forked|out of resource: shared memory
        Index put requires|view size is not compatible""", confidence=0.85),
    # the mode of a shared volume, or the wrong folder: nothing decides
    raised("unknown", r"PermissionError", r"""
        '/(?:mnt|fsx|efs|nfs|lustre|shared|gpfs|checkpoints?|ckpts?|datasets?)\b""", confidence=0.3),
    raised("user_arguments", r"""
        FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError|FileExistsError""", confidence=0.65),
    raised("user_arguments", PLAIN, r"""
        (?:Arguments|Config)\S*__init__\(\) got an unexpected keyword|arguments are not used by the HfArgumentParser
        ^(?:unknown|unrecognized|unsupported|invalid) (?:argument|option|config|optimizer|scheduler|model|flag|setting)
        ^(?:unknown|unrecognized|unsupported|invalid) (?:value for|choice|parameter|dtype|precision|strategy|backend)
        batch.?size.{0,80}(?:divisible|must|should|positive)|must be divisible by|is not divisible
        not (?:a )?multiple of|config\w*.{0,60}(?:missing|invalid|required|must|should|expected|not)
        mutually exclusive|environment variable|argument.{0,40}(?:must|should|required|invalid)
        (?:Expected|expected) one of|is not a valid (?:choice|option)
        (?:learning.?rate|lr|num_\w+|micro_batch\w*|tensor.?parallel\w*|pipeline\w*|tp_size).{0,60}(?:must|should)
        (?:world.?size|tensor.?parallel\w*|pipeline\w*|tp_size|num_\w+).{0,60}(?:divisible|invalid|not equal)
        (?:world.?size|tensor.?parallel\w*|pipeline\w*|tp_size|num_\w+).{0,60}(?:does not|cannot|must|should)
        --\w+.{0,60}(?:must|required|should|invalid|expected)|requires? --|could not interpret
        mixed precision requires|both .{0,60} cannot be|Please (?:set|specify|provide|pass)""", confidence=0.65),
    raised("segfault", r"SegmentationFault"),
    raised("user_code", r"""
        SyntaxError|IndentationError|TabError|NameError|UnboundLocalError|ZeroDivisionError|RecursionError
        NotImplementedError""", confidence=0.9),
    raised("user_code", r"""
        TypeError|AttributeError|KeyError|IndexError|ValueError|AssertionError|Unsupported|InternalTorchDynamoError
        BackendCompilerFailed|LoweringException|ReferenceError|LookupError|OverflowError|InductorError
        TorchRuntimeError""", confidence=0.8),
    line("user_arguments", rf"""
        Flags parsing error|In '\S+': Could not find '|No such option: |Could not override|Key '\S+' (?:is )?not in
        {ARGPARSE}(?:unrecognized arguments|the following arguments are required|argument |ambiguous option)
        {ARGPARSE}(?:one of the arguments|too few arguments|expected|invalid choice|.{0,40}required)
        Error: (?:No such option|Invalid value|Missing (?:option|argument|parameter)|Got unexpected)
        error: (?:run file|unknown key|\S+ is not a key)""", confidence=0.9),
    line("user_import", r"""
        \S*python[\d.]*: (?:No module named|Error while finding module specification)""", confidence=0.9),
    line("nan", rf"""
        (?:\w+: )?(?:training )?(?:loss|grad\w*(?: norm)?)\b.{{0,60}}(?:is|became|was|=|:|are) ?{NAN}.{{0,80}}{STOPS}
        .{{0,20}}(?:nan|non-finite).{{0,40}}(?:detected|encountered|loss).{{0,80}}{STOPS}|Loss is (?:nan|inf)"""),
    line("segfault", r"""
        Segmentation fault(?: \(core dumped\))?|Fatal Python error: (?:Segmentation fault|Aborted|Illegal instruction)
        (?:\S{0,120}: )?line \d+: +\d+ (?:Segmentation fault|Aborted|Illegal instruction)
        .{0,40}Signal: Segmentation fault
        free\(\): invalid|double free or corruption|malloc\(\): |munmap_chunk\(\)|corrupted (?:size|double)
        Aborted \(core dumped\)|srun: error: \S+: tasks?.{0,60}: (?:Segmentation fault|Aborted)
        !+ ?Segfault encountered|.{0,60}Caught signal 11|\*\*\* SIGSEGV""", confidence=0.8),
    line("segfault", by_launcher("(?:4|6|11)", "SIG(?:SEGV|ABRT|ILL)"), confidence=0.8),
)  # fmt: skip
