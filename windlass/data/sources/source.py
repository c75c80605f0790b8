"""What `data.source` means: token shards, text files, here or in an object store, or a `datasets` source to stream."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from windlass.data.sources.files import InputFile, listed, nothing_at, store_and_name
from windlass.data.sources.records import selector
from windlass.errors import UserError
from windlass.spec.data import DataSection
from windlass.store import bucket_and_prefix, is_store_url

HUB_PREFIX = "hf:"
CORPUS_PREFIX = "corpus:"
PYTHON_PREFIX = "python:"
CORPORA = {"austen": "austen.jsonl.gz"}
FILE_BUILDERS = ("json", "text", "parquet", "csv", "arrow")  # `datasets` readers of files that data.files names
DEFAULT_CONFIGS = {"allenai/c4": "en"}
INDEX_NAME = "index.json"  # in a folder of token shards
Format = Literal["jsonl", "csv", "text", "parquet"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
KINDS = f"text files end in {', '.join(FORMATS)}; all but the last also with {', '.join(COMPRESSIONS)}"
OWN_FILES = frozenset({"fetched.yaml"})  # what `windlass data fetch` leaves beside its parts


@dataclass(frozen=True)
class ShardSource:
    """A folder that `windlass data tokenize` made."""

    folder: Path
    name: str


@dataclass(frozen=True)
class StoreShardSource:
    """The same in an object store."""

    url: str
    name: str


@dataclass(frozen=True)
class FileSource:
    """Text files, on this machine or in an object store, in a fixed order."""

    files: tuple[InputFile, ...]
    text_field: str
    name: str
    ignored: tuple[str, ...] = ()  # files beside them that are of no known kind
    skip_bad: bool = False  # records that cannot be read are left out and counted

    def about_ignored(self) -> str | None:
        """What is said of the files that are not read."""
        if not self.ignored:
            return None
        names = ", ".join(self.ignored[:5]) + ", …" * (len(self.ignored) > 5)
        count = "1 file" if len(self.ignored) == 1 else f"{len(self.ignored):,} files"
        return f"of {self.name} not read, being of no known kind: {count}: {names}; {KINDS}"


@dataclass(frozen=True)
class HubSource:
    """A `datasets` source."""

    path: str
    config: str | None
    split: str
    files: tuple[str, ...]
    text_field: str
    revision: str | None = None
    skip_bad: bool = False

    @property
    def name(self) -> str:
        return HUB_PREFIX + self.path + (f" ({self.config})" if self.config else "") + f", split {self.split}"


@dataclass(frozen=True)
class PythonSource:
    """A dataset of the user's own, by its import path."""

    path: str

    @property
    def name(self) -> str:
        return PYTHON_PREFIX + self.path


Source = ShardSource | StoreShardSource | FileSource | HubSource | PythonSource


def parse_source(data: DataSection, part: Literal["train", "validation"]) -> Source:
    """The source that a run trains on, or the one it validates on."""
    training = part == "train"
    text = data.source if training else data.validation_source or ""
    if not training and text.startswith(HUB_PREFIX) and text.removeprefix(HUB_PREFIX) in FILE_BUILDERS:
        raise UserError(
            f"data.validation_source={text} names no files: data.files are those of the training data",
            fix="data.validation_source=PATH    with the validation file itself",
        )
    return source_named(
        text,
        config=data.config if text == data.source else None,
        split=data.split if training else data.validation_split,
        files=data.files if training else (),
        text_field=selector(data),
        revision=data.revision if text == data.source else None,
        skip_bad=data.bad_records == "skip",
    )


def parts_of(data: DataSection) -> list[DataSection]:
    """The sections of the mixed sources, each as if it were the only one; of a single source, its own."""
    return [
        data.model_copy(
            update={
                "source": mixed.source,
                "sources": (),
                "config": mixed.config,
                "split": mixed.split or data.split,
                "revision": mixed.revision,
                "files": mixed.files,
                "text_field": mixed.text_field or data.text_field,
            }
        )
        for mixed in data.sources
    ] or [data]


def only_shards(data: DataSection) -> bool:
    """Whether all that a run reads is tokenized already: shards bring their tokenizer with them."""
    sources = [parse_source(part, "train") for part in parts_of(data)]
    sources += [parse_source(data, "validation")] if data.validation_source else []
    return all(isinstance(source, ShardSource | StoreShardSource) for source in sources)


def source_named(
    text: str,
    *,
    config: str | None = None,
    split: str = "train",
    files: tuple[str, ...] = (),
    text_field: str = "text",
    revision: str | None = None,
    skip_bad: bool = False,
) -> Source:
    if text.startswith(HUB_PREFIX):
        hub = hub_source(text, config=config, split=split, files=files, text_field=text_field)
        return replace(hub, revision=revision, skip_bad=skip_bad)
    if files:
        raise UserError(
            "data.files belongs to a hf: source", evidence=f"data.source={text}", fix=f"data.source={files[0]}"
        )
    if text.startswith(PYTHON_PREFIX):
        return PythonSource(text.removeprefix(PYTHON_PREFIX))
    if text.startswith(CORPUS_PREFIX):
        source: Source = corpus(text)
    else:
        source = store_source(text, text_field) if "://" in text else local_source(text, text_field)
    return replace(source, skip_bad=skip_bad) if isinstance(source, FileSource) else source


def hub_source(text: str, *, config: str | None, split: str, files: tuple[str, ...], text_field: str) -> HubSource:
    path = text.removeprefix(HUB_PREFIX).strip()
    if not path or path.count("/") > 1 or path.startswith("/") or path.endswith("/") or " " in path:
        raise UserError(
            f"{text!r} names no dataset",
            cause="hf:OWNER/NAME, or hf:json with data.files, is expected",
            fix="hf:allenai/c4",
        )
    if path in FILE_BUILDERS and not files:
        raise UserError(
            f"data.source={text} needs data.files",
            cause=f"{text} reads the files you name: paths, globs or URLs",
            fix='data.files=["data/*.jsonl"]',
        )
    if files and path not in FILE_BUILDERS:
        builders = ", ".join(HUB_PREFIX + builder for builder in FILE_BUILDERS)
        raise UserError(f"data.files is for {builders}, not for {text}", fix=f"data.source={HUB_PREFIX}json")
    return HubSource(path, config or DEFAULT_CONFIGS.get(path), split, files, text_field)


def corpus(text: str) -> FileSource:
    name = text.removeprefix(CORPUS_PREFIX)
    if name not in CORPORA:
        raise UserError(
            f"there is no corpus {name!r}",
            evidence=f"shipped corpora: {', '.join(CORPUS_PREFIX + shipped for shipped in CORPORA)}",
            fix=f"data.source={CORPUS_PREFIX}{next(iter(CORPORA))}",
        )
    return FileSource((assets() / CORPORA[name],), text_field="text", name=name)


def assets() -> Path:
    return Path(__file__).parents[1] / "assets"


def store_source(url: str, text_field: str) -> StoreShardSource | FileSource:
    """Shards or text files in an object store."""
    if not is_store_url(url):
        raise UserError(
            f"{url} cannot be read",
            cause="files over http are read by hf:json, hf:text or hf:parquet with data.files",
            fix=f'data.source=hf:json data.files=["{url}"]    or s3://BUCKET/PREFIX',
        )
    bucket_and_prefix(url)
    folder = url.removesuffix(INDEX_NAME).rstrip("/")
    store, name = store_and_name(folder)
    if not glob.has_magic(name) and store.stat(f"{name}/{INDEX_NAME}" if name else INDEX_NAME):
        return StoreShardSource(folder, folder.rsplit("/", 1)[-1])
    listing = listed(url)
    if not listing:
        raise nothing_at(url)
    files = [file for file in listing if file_format(Path(file.name))]
    if not files:
        raise UserError(
            f"{url} holds neither token shards nor text files",
            evidence=f"it holds {', '.join(file.name for file in listing[:5])}{', …' * (len(listing) > 5)}",
            cause=f"shards have an {INDEX_NAME}, written last; {KINDS}",
            fix="windlass data tokenize FILES -o FOLDER",
        )
    ignored = tuple(file.name for file in listing if file not in files and is_content(file.name))
    return FileSource(tuple(files), text_field, name=url, ignored=ignored)


def local_source(text: str, text_field: str) -> ShardSource | FileSource:
    if not text.strip():
        raise UserError("data.source is empty", fix="data.source=corpus:austen")
    path = Path(text).expanduser()
    if path.is_dir():
        return folder_source(path, text_field)
    if path.exists():
        if path.name == INDEX_NAME:
            return ShardSource(path.parent, path.parent.name)
        return FileSource((readable(path),), text_field, name=path.name)
    if glob.has_magic(text):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if not matches:
            raise UserError(f"no file matches {text}", evidence=nearest(path), fix=f"ls {path.parent}")
        return FileSource(tuple(readable(file) for file in matches), text_field, name=text)
    raise UserError(f"there is no file or folder {text}", evidence=nearest(path), fix=missing_fix(path))


def folder_source(folder: Path, text_field: str) -> ShardSource | FileSource:
    if (folder / INDEX_NAME).exists():
        return ShardSource(folder, folder.resolve().name)
    below = sorted(files_below(folder))
    files = tuple(path for path in below if file_format(path))
    if not files:
        names = sorted(path.name for path in folder.iterdir())
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise UserError(
            f"{folder} holds neither token shards nor text files" if names else f"{folder} is an empty folder",
            evidence=f"it holds {some}" if names else None,
            cause=f"shards have an {INDEX_NAME}, written last; {KINDS}",
            fix="windlass data tokenize FILES -o FOLDER",
        )
    ignored = tuple(str(path.relative_to(folder)) for path in below if not file_format(path) and is_content(path.name))
    return FileSource(files, text_field, name=folder.resolve().name, ignored=ignored)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, also of folders that are linked into it, each folder once."""
    entered: set[Path] = set()
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        if here.resolve() in entered:
            continue  # two links to one folder, or a link to a folder above
        entered.add(here.resolve())
        for path in sorted(here.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                waiting.append(path)
            elif path.is_file():
                yield path


def is_content(name: str) -> bool:
    """Whether a file may be meant as data, so that leaving it unread is worth a word."""
    return not name.startswith(".") and name not in OWN_FILES


def file_format(path: Path) -> Format | None:
    name = path.name.lower()
    if name.startswith("."):
        return None
    plain = name.removesuffix(compression(name) or "")
    kind = next((kind for suffix, kind in FORMATS.items() if plain.endswith(suffix)), None)
    return None if kind == "parquet" and plain != name else kind


def compression(name: str) -> str | None:
    """The suffix that says how a file is compressed, in lower case."""
    return next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), None)


def readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(f"{path} is of no known kind", cause=KINDS, fix="a copy with a suffix that says its kind")
    return path


def nearest(path: Path) -> str | None:
    """What is there, closest in name to what is missing."""
    parent = path.parent
    if not parent.is_dir():
        missing = next(folder for folder in [*reversed(parent.parents), parent] if not folder.is_dir())
        return f"the folder {missing} does not exist"
    near = closest(path)
    return f"the nearest name there is {near}" if near else None


def closest(path: Path) -> Path | None:
    if not path.parent.is_dir():
        return None
    names = {child.name: child.name.partition(".")[0] for child in path.parent.iterdir()}
    own_stem = path.name.partition(".")[0]  # .jsonl alone is no likeness
    stems = difflib.get_close_matches(own_stem, set(names.values()), 1)
    alike = [name for name, stem in names.items() if stem in stems]
    near = difflib.get_close_matches(path.name, alike, 1, cutoff=0.0)
    return path.parent / near[0] if near else None


def missing_fix(path: Path) -> str | None:
    near = closest(path)
    if near:
        return f"data.source={near}"
    if not path.is_absolute() and str(path).count("/") == 1:
        return f"data.source={HUB_PREFIX}{path}    if the dataset of that name is meant"
    return None
