"""The files of a `datasets` source, read document by document from any place, through broken connections.

Which commit of a dataset is read: asked for once, so that a fetch that takes days reads one version of it.
"""

from __future__ import annotations

import logging
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from windlass.common.hub import chain, first_line, import_hub, retry_after, with_retries
from windlass.common.retrying import doubling, retried
from windlass.data.sources.records import BadRecordError, example_text, is_selector, require_unicode
from windlass.data.sources.source import FILE_BUILDERS, HubSource
from windlass.errors import ExitCode, UserError

log = logging.getLogger(__name__)

RETRIES = 6  # without a document in between
RATE_LIMIT_RETRIES = 30
LONGEST_WAIT_S = 600.0
FIRST_DELAY_S = 0.5
PERMANENT_STATUSES = frozenset({400, 401, 403, 404, 410, 416, 451})
NETWORK_MODULES = ("httpx", "httpcore", "requests", "urllib3", "aiohttp", "huggingface_hub", "fsspec")


@dataclass(frozen=True)
class DataFile:
    """A file of a `datasets` source, and what is known of its version."""

    url: str  # or a path
    origin: tuple[str, ...]  # (repository, commit) on a hub, the server's ETag, or a time


class DocumentFiles(Protocol):
    """Files of documents that can be read from any document on."""

    name: str
    num_files: int

    def documents(self, file: int, skip: int) -> Iterator[str]:
        """The texts of one file, the first `skip` left out."""
        ...


class HubFiles:
    """The files of a `datasets` source, opened for streaming. Its own position keeping is not used."""

    def __init__(self, source: HubSource, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.name = source.name
        self.source = source
        self._sleep = sleep
        self._dataset, self.data_files = retried(
            lambda: load(source),
            pause_after=lambda error, failures: pause_or_give_up(error, failures, self.name, "cannot be opened"),
            sleep=sleep,
        )
        self.num_files = int(self._dataset.num_shards)
        if self.num_files < 1:
            raise empty_source(self.name)

    def documents(self, file: int, skip: int, skipped: Callable[[UserError], None] | None = None) -> Iterator[str]:
        """The texts of one file from document `skip` on; of records that are left out an empty one."""
        for document, row in enumerate(self.records(file, skip), start=skip):
            try:
                yield self._text(row, file, document)
            except BadRecordError as error:
                if not self.source.skip_bad:
                    raise
                if skipped:
                    skipped(error)
                else:
                    log.warning("left out: %s", error.what)
                yield ""

    def records(self, file: int, skip: int) -> Iterator[dict[str, Any]]:
        """The records of one file from number `skip` on; a broken connection is taken up where it broke."""
        failures = 0
        while True:
            try:
                for row in self._rows(file, skip):
                    skip += 1
                    failures = 0
                    yield row
                return
            except Exception as error:  # whatever the transport, the decompressor or the parser makes of a lost peer
                failures += 1
                where = f"cannot be read at document {skip:,} of file {file:,}"
                self._sleep(pause_or_give_up(error, failures, self.name, where))

    def _rows(self, file: int, skip: int) -> Iterator[dict[str, Any]]:
        # One file at a time: skipping is exact there, and files that are done cost nothing.
        rows = self._dataset.shard(num_shards=self.num_files, index=file)
        return iter(rows.skip(skip) if skip else rows)

    def _text(self, row: dict[str, Any], file: int, document: int) -> str:
        field = self.source.text_field
        where = f"document {document:,} of file {file:,} of {self.name}"
        if is_selector(field):
            return example_text(row, field, where)
        if field not in row:
            raise UserError(
                f"the records of {self.name} have no field {field!r}",
                evidence=f"fields there: {', '.join(map(str, row))}",
                fix=f"data.text_field={next((name for name, value in row.items() if isinstance(value, str)), '…')}",
            )
        text = row[field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise BadRecordError(
                f"the field {field!r} of {where} is no text",
                evidence=f"it is {type(text).__name__}: {str(text)[:80]}",
                fix="data.text_field=…",
            )
        return require_unicode(text, where)


def pause_or_give_up(error: Exception, failures: int, name: str, failure: str) -> float:
    """Seconds to wait before another try; raises where it is clear that it would not help."""
    if isinstance(error, UserError):
        raise error
    network, requested_s = is_network_error(error), min(retry_after(error) or 0.0, LONGEST_WAIT_S)
    if network:  # a server that says when to come again is taken at its word for longer than one that is not there
        allowed = RATE_LIMIT_RETRIES if requested_s else RETRIES
    else:  # a file cut short by a lost connection can look like bad data: worth one more look; what is not there is not
        missing = any(isinstance(link, FileNotFoundError | PermissionError) for link in chain(error))
        allowed = 0 if missing or str(error).startswith(("BuilderConfig", "Bad split", "Unknown split")) else 1
    if failures > allowed:
        tries = f" after {failures} tries" if failures > 1 else ""
        raise UserError(
            f"{name} {failure}{tries}",
            evidence=describe(error),
            cause="the connection fails" if network else None,
            fix="check the network, HF_ENDPOINT, HF_TOKEN and proxies, then run again: it goes on where it stopped"
            if network
            else "check the name, data.config, data.split and data.files (fetch: --config, --split, --file)",
            exit_code=ExitCode.FAILED if network else ExitCode.BAD_INPUT,
        ) from error
    pause = max(doubling(FIRST_DELAY_S, failures), requested_s)
    log.warning("%s %s (%s); trying again in %.1f s", name, failure, describe(error), pause)
    return pause


def load(source: HubSource) -> tuple[Any, list[DataFile]]:
    """The dataset opened for streaming, and its files."""
    datasets = import_datasets()
    # After a failed read its own retry goes on in the middle of a gzip stream and can lose bytes unnoticed: one try
    # only, so that a failure reaches us and the file is opened again at a known document.
    for setting, value in {
        "STREAMING_READ_MAX_RETRIES": 1,
        "STREAMING_READ_RETRY_INTERVAL": 0,
        "STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL": 0,
        "STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL": 0,
        "STREAMING_OPEN_MAX_RETRIES": 1,
        "STREAMING_OPEN_RETRY_INTERVAL": 0,
        "TORCH_AVAILABLE": "torch" in sys.modules,  # else it imports torch for its types, which takes seconds
    }.items():
        setattr(datasets.config, setting, value)
    if any(file.startswith(("http://", "https://")) for file in source.files):
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise UserError(
                f"{source.name} names URLs, and aiohttp is not installed", fix="pip install aiohttp"
            ) from None
    builder = datasets.load_dataset_builder(
        source.path,
        source.config,
        **({"revision": source.revision} if source.revision else {}),
        **({"data_files": {source.split: list(source.files)}} if source.files else {}),
    )
    dataset = builder.as_streaming_dataset(split=source.split)
    if not isinstance(dataset, datasets.IterableDataset):
        raise UserError(f"{source.name} is not one split but several", fix="data.split=train")
    listed = (builder.config.data_files or {}).get(source.split.partition("[")[0], [])
    origins = getattr(listed, "origin_metadata", None) or [()] * len(listed)
    return dataset, [DataFile(str(url), tuple(map(str, origin))) for url, origin in zip(listed, origins, strict=False)]


def import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("hf: sources need the `datasets` library", fix="pip install 'windlass[train]'") from None
    return datasets


def is_network_error(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    for link in chain(error):
        status = getattr(getattr(link, "response", None), "status_code", None) or getattr(link, "status", None)
        if isinstance(status, int):
            return status not in PERMANENT_STATUSES
        if isinstance(link, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        if isinstance(link, ConnectionError | TimeoutError | EOFError | zlib.error):
            return True
        if type(link).__module__.split(".")[0] in NETWORK_MODULES and not isinstance(link, ValueError | TypeError):
            return True
    return False


def describe(error: BaseException) -> str:
    """The error and what it came from, outermost first."""
    return ", from ".join(dict.fromkeys(f"{type(link).__name__}: {first_line(link)}" for link in chain(error)))


def empty_source(name: str) -> UserError:
    return UserError(f"{name} holds no documents", cause="every file of it is empty, or every text in it")


def pinned(source: HubSource) -> HubSource:
    """The source at the commit that it is at now; an unknown or closed dataset is an error here."""
    if source.path in FILE_BUILDERS or source.revision:
        return source
    hub = import_hub(source.path)
    if hub.constants.is_offline_mode():
        raise UserError(f"{source.name} is on a hub, and HF_HUB_OFFLINE forbids asking it", fix="unset HF_HUB_OFFLINE")

    def ask() -> str:
        facts = hub.HfApi().dataset_info(source.path, timeout=20)
        if facts.gated:
            hub.HfApi().auth_check(source.path, repo_type="dataset")
        return str(facts.sha)

    return replace(source, revision=with_retries(ask, source.path, "dataset"))
