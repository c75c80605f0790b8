"""What can be known to be wrong with a run's data before anything is paid for. Fast."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

from windlass.data.sequences import holdout_of_a_stream
from windlass.data.sources import FileSource, HubSource, ShardSource, parse_source
from windlass.errors import UserError
from windlass.spec import Run


def check_data(run: Run) -> None:
    """Raise a UserError if the run's data cannot be what it says."""
    check_part(run, parse_source(run.data, "train"), training=True)
    if run.data.validation_source:
        check_part(run, parse_source(run.data, "validation"), training=False)


def check_part(run: Run, source: ShardSource | FileSource | HubSource, *, training: bool) -> None:
    match source:
        case HubSource():
            if training and run.data.holdout:
                raise holdout_of_a_stream(run.data.source)
            if importlib.util.find_spec("datasets") is None:
                raise UserError(f"{source.name} needs the `datasets` library", fix="pip install 'windlass[train]'")
        case ShardSource():
            check_shards(run, source, training=training)
        case FileSource():
            check_files(source)


def check_shards(run: Run, source: ShardSource, *, training: bool) -> None:
    from windlass.data.shards import TokenShards, require_same_tokenizer
    from windlass.data.windows import Windows

    shards = TokenShards.open(source.folder)
    if run.data.tokenizer and run.data.tokenizer != shards.index.tokenizer.name:
        # The same name is taken at its word: ranks on a closed network must not ask a hub for what the shards hold.
        from windlass.data.tokenizer import load_tokenizer

        require_same_tokenizer(shards, load_tokenizer(run.data.tokenizer).fingerprint, run.data.tokenizer)
    if not shards.num_tokens:
        raise UserError(f"{source.folder} holds no tokens", fix="windlass data tokenize FILES -o FOLDER")
    if run.data.sequence_length:
        windows = Windows.whole(shards, source.name, run.data.sequence_length)
        if training:
            windows.split(run.data.holdout)


def check_files(source: FileSource) -> None:
    """Every file can be read and one holds something; the first record is as the run says."""
    filled: list[Path] = []
    for path in source.files:
        try:
            with path.open("rb") as file:
                if file.read(1):
                    filled.append(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read", evidence=str(error)) from None
    if not filled:
        names = (
            f"{source.files[0]} is" if len(source.files) == 1 else f"all {len(source.files)} files of {source.name} are"
        )
        raise UserError(f"{names} empty", fix="data.source=corpus:austen    is text to try with")
    check_first_record(filled[0], source.text_field)


def check_first_record(path: Path, text_field: str) -> None:
    from windlass.data.reading import documents, file_pieces
    from windlass.data.sources import file_format

    if file_format(path) == "text":
        return  # reading it would read all of it
    piece = next(file_pieces(path, text_field), None)
    if piece is None or not list(islice(documents(piece), 1)):
        raise UserError(f"{path} holds no text in the field {text_field!r}")
