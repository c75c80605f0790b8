"""What can be known to be wrong with a run's data, and with what it takes from a hub, before anything is paid for."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from windlass.catalog.models import preset
from windlass.common.hub import check_access, is_hub_id
from windlass.data.build.cache import check_cache, open_shards
from windlass.data.build.worker import encode, has_label
from windlass.data.sequences.opening import check_weights, windows_of
from windlass.data.sequences.packing import nothing_fits
from windlass.data.sequences.sequences import check_format, check_stream
from windlass.data.sequences.windows import all_held_out, too_little
from windlass.data.shards.folder import require_same_tokenizer
from windlass.data.sources.files import InputFile, size_of
from windlass.data.sources.reading import Skipped, documents, file_pieces
from windlass.data.sources.records import is_selector
from windlass.data.sources.source import (
    FILE_BUILDERS,
    HUB_PREFIX,
    FileSource,
    HubSource,
    PythonSource,
    ShardSource,
    Source,
    StoreShardSource,
    compression,
    file_format,
    only_shards,
    parse_source,
    parts_of,
)
from windlass.data.tokenizers.chat import ExampleTokenizer, encoder
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import ExitCode, UserError
from windlass.spec import Run

MANY_EPOCHS = 100
BYTES_PER_TOKEN = 4  # of text, roughly
SCAN_BYTES = 128 << 20  # read in a second or two
COMPRESSED = 4  # bytes that a compressed one stands for
TOKENIZED_AT_ONCE = 16
RENDERED = 1000  # chats whose template is tried


def check_data(run: Run, *, thorough: bool = False) -> list[str]:
    """Raise a UserError if the run's data cannot be what it says; warnings for what is left aside.

    Thorough: text files on this machine are read, as far as that takes no longer than some seconds.
    """
    check_weights(run.data)
    warnings: list[str] = []
    weights = [source.weight for source in run.data.sources] or [1.0]
    for data, weight in zip(parts_of(run.data), weights, strict=True):
        part = run.model_copy(update={"data": data})
        share = weight / sum(weights)
        warnings += check_part(part, parse_source(data, "train"), training=True, thorough=thorough, share=share)
    if run.data.validation_source:
        warnings += check_part(run, parse_source(run.data, "validation"), training=False, thorough=thorough)
    return warnings


def check_part(run: Run, source: Source, *, training: bool, thorough: bool, share: float = 0.0) -> list[str]:
    """`share`: of the run's sequences, those that come from this source."""
    warnings: list[str] = []
    reads = run.train.steps * run.train.global_batch * share
    match source:
        case HubSource():
            check_stream(run.data, training=training)
            if importlib.util.find_spec("datasets") is None:
                raise UserError(f"{source.name} needs the `datasets` library", fix="pip install 'windlass[train]'")
        case PythonSource():
            if run.data.format != "text":
                raise UserError(
                    f"data.format={run.data.format} is for records of text, and {source.name} gives tokens",
                    fix="drop data.format; an item may be {'tokens': …, 'loss': …}",
                )
        case ShardSource() | StoreShardSource():
            num_sequences = check_shards(run, source, training=training)
            warnings += about_repetition(run, source.name, reads, num_sequences)
        case FileSource():
            num_bytes = check_files(source)
            sequences = num_bytes / BYTES_PER_TOKEN / (run.data.sequence_length or math.inf)
            if run.data.format != "text":
                sequences = max(1.0, sequences)  # a row of examples is filled up with padding
            warnings += about_repetition(run, source.name, reads, sequences, about="about ")
            warnings += check_template(run)
            unread = source.about_ignored()
            warnings += [unread] if unread else []
            if thorough:
                warnings += scan(source, run, training=training)
    return warnings


def about_repetition(run: Run, name: str, reads: float, num_sequences: float, about: str = "") -> list[str]:
    """A warning where a run reads a source so often that it learns it by heart."""
    if not num_sequences or reads / num_sequences < MANY_EPOCHS:
        return []
    steps = max(1, int(run.train.steps * 10 * num_sequences / reads))
    fewer = max(10.0, steps / run.train.steps * reads / num_sequences)  # one step alone may read it more often
    return [
        f"the run reads {name} {about}{reads / num_sequences:,.0f} times and will learn it by heart; "
        f"train.steps={steps} reads it {about}{fewer:,.0f} times"
    ]


def check_shards(run: Run, source: ShardSource | StoreShardSource, *, training: bool) -> int:
    """The number of sequences to train on, where their length is known, and else 0."""
    shards = open_shards(source, tokenizer="", cache_gib=run.data.cache_gib)
    if run.data.tokenizer and run.data.tokenizer != shards.index.tokenizer.name:
        # The same name is taken at its word: ranks on a closed network must not ask a hub for what the shards hold.
        own = encoder(load_tokenizer(run.data.tokenizer), run.data)
        require_same_tokenizer(shards, own.fingerprint, run.data.tokenizer)
    check_format(shards, source.name, run.data)
    if not shards.num_tokens:
        raise UserError(f"{source.name} holds no tokens", fix="windlass data tokenize FILES -o FOLDER")
    if not run.data.sequence_length:
        return 0
    windows = windows_of(shards, source.name, run.data, run.data.sequence_length)
    if training:
        windows, _ = windows.split(run.data.holdout)
    return windows.num_sequences


def check_template(run: Run) -> list[str]:
    """A tokenizer that is here says before the start whether it can render chats; one of a hub says it to the ranks."""
    name = run.data.tokenizer
    if run.data.format == "text" or not name or is_hub_id(name):
        return []
    tokenizer = encoder(load_tokenizer(name), run.data)
    if not isinstance(tokenizer, ExampleTokenizer) or tokenizer.ends_answers:
        return []
    return [f"the chat template of {name} puts nothing after an answer: the model does not learn where to stop"]


def check_files(source: FileSource) -> int:
    """How many bytes the files hold, unpacked. Each can be read, and the first record is as the run says."""
    filled: list[InputFile] = []
    num_bytes = 0
    for path in source.files:
        try:
            if isinstance(path, Path):
                with path.open("rb") as file:
                    file.read(1)
            if size := size_of(path):
                filled.append(path)
                num_bytes += size * (COMPRESSED if compression(path.name) else 1)
        except OSError as error:
            raise UserError(f"{path} cannot be read", evidence=str(error), fix=f"ls -l {path}") from None
    if not filled:
        names = (
            f"{source.files[0]} is" if len(source.files) == 1 else f"all {len(source.files)} files of {source.name} are"
        )
        raise UserError(f"{names} empty", fix="data.source=corpus:austen    is text to try with")
    if not source.skip_bad:
        check_first_record(filled[0], source.text_field)
    return num_bytes


def check_first_record(path: InputFile, text_field: str) -> None:
    if file_format(Path(path.name)) == "text":
        return  # reading it would read all of it
    piece = next(file_pieces(path, text_field), None)
    if piece is None or not list(islice(documents(piece), 1)):
        what = "records" if is_selector(text_field) else f"text in the field {text_field!r}"
        raise UserError(
            f"{path} holds no {what}",
            fix=f"windlass data inspect {path}    shows what is in it; data.text_field=FIELD names another field",
        )


def scan(source: FileSource, run: Run, *, training: bool) -> list[str]:
    """Raise a UserError for the first record that cannot be read; warnings for what was not looked at."""
    if run.target.kind == "local":
        check_cache()  # elsewhere it is not this machine's
    left, unread_bytes, skipped = SCAN_BYTES, 0, Skipped()
    probe = Probe(run, source.name, training=training)
    for file in source.files:
        if not isinstance(file, Path):
            unread_bytes += file.size
            continue
        for piece in file_pieces(file, source.text_field, skip_bad=source.skip_bad):
            cost = piece.size * (COMPRESSED if compression(piece.path) else 1)
            if cost > left:
                unread_bytes += piece.size
                continue
            left -= cost
            for text in documents(piece, skipped):
                probe.add(text)
    warnings = []
    if unread_bytes:
        warnings.append(
            f"{unread_bytes / 1e6:,.0f} MB of {source.name} were not looked at beforehand: "
            "a bad record there ends the run when its text is tokenized"
        )
    else:
        probe.require_enough()
    if skipped.count:
        reasons = "; ".join(skipped.reasons)
        warnings.append(f"{skipped.count:,} bad records of {source.name} are left out: {reasons}")
    return warnings


class Probe:
    """Tokenizes until it is clear that there is enough to train on; then it only counts."""

    def __init__(self, run: Run, name: str, *, training: bool) -> None:
        data = run.data
        self.name, self.data, self.length = name, data, data.sequence_length or 0
        self.wanted = 2 if training and data.holdout else 1
        self.num_tokens = self.num_documents = 0
        self.enough = not (data.tokenizer and not is_hub_id(data.tokenizer) and self.length)
        self.tokenizer: Tokenizer | None = None if self.enough else encoder(load_tokenizer(data.tokenizer or ""), data)
        self.waiting: list[str] = []

    def add(self, text: str) -> None:
        self.num_documents += 1
        refuses = isinstance(self.tokenizer, ExampleTokenizer) and self.data.bad_records == "refuse"
        if refuses and self.enough and self.num_documents <= RENDERED:
            assert isinstance(self.tokenizer, ExampleTokenizer)
            self.tokenizer.rendered(json.loads(text))
        if not self.enough:
            self.waiting.append(text)
            if len(self.waiting) >= TOKENIZED_AT_ONCE:
                self._tokenize()

    def _tokenize(self) -> None:
        assert self.tokenizer is not None
        self.tokenizer.require_eos()
        room = self.length + 1
        _, encoded = encode(self.tokenizer, self.waiting, Skipped() if self.data.bad_records == "skip" else None)
        for ids in encoded:
            self.num_tokens += len(ids)
            fits = self.data.too_long == "truncate" or len(ids) <= room
            if self.tokenizer.marks_loss and fits and has_label(ids[:room]):
                self.enough = True
        if not self.tokenizer.marks_loss and self.num_tokens > self.wanted * self.length:
            self.enough = True
        self.waiting = []

    def require_enough(self) -> None:
        """Raise a UserError where all of the text was seen and is too little."""
        if self.waiting and not self.enough:
            self._tokenize()
        if self.enough or self.tokenizer is None or not self.num_documents:
            return
        if self.tokenizer.marks_loss:
            raise nothing_fits(self.name, self.length, self.num_documents, self.data.too_long)
        if self.num_tokens <= self.length:
            raise too_little(self.name, self.num_tokens, self.length)
        raise all_held_out(self.name, (self.num_tokens - 1) // self.length, self.length, self.data.holdout)


@dataclass(frozen=True)
class Repository:
    """Something of a hub that a run needs."""

    name: str
    what: str
    kind: str  # "model" or "dataset"
    revision: str | None = None


def repositories(run: Run) -> Iterator[Repository]:
    """What a resolved run takes from a hub."""
    model, data = run.model, run.data
    if model.path and is_hub_id(model.path):
        yield Repository(model.path, "model", "model", model.revision)
    elif model.preset and model.init == "pretrained":
        hub_id = preset(model.preset).hub_id
        if hub_id:
            yield Repository(hub_id, "model", "model", model.revision)
    if model.lora and model.lora.adapter and is_hub_id(model.lora.adapter):
        yield Repository(model.lora.adapter, "adapter", "model")
    for text in (*(part.source for part in parts_of(data)), data.validation_source or ""):
        name = text.removeprefix(HUB_PREFIX)
        if name != text and name not in FILE_BUILDERS:
            yield Repository(name, "dataset", "dataset")
    if data.tokenizer and is_hub_id(data.tokenizer) and not only_shards(data):
        yield Repository(data.tokenizer, "tokenizer", "model")


def check_hub(run: Run) -> list[str]:
    """Raise a UserError for what the hub refuses; warnings for what could not be asked from here.

    A machine that submits may be shut off from the hub while those that train are not.
    """
    warnings: list[str] = []
    checked: set[tuple[str, str]] = set()
    for repository in repositories(run):
        if (repository.name, repository.kind) in checked:
            continue
        checked.add((repository.name, repository.kind))
        try:
            check_access(repository.name, what=repository.what, revision=repository.revision, kind=repository.kind)
        except UserError as error:
            if error.exit_code != ExitCode.FAILED:
                raise
            warnings.append(f"{error.what}: {error.evidence}; not known whether the ranks can fetch it")
            break  # the others are on the same hub
    return warnings
