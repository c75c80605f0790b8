"""What `data.source` means: token shards, text files, here or in an object store, or a `datasets` source to stream."""

from __future__ import annotations

import difflib
import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.data.inputs import InputFile, listed, nothing_at, store_and_name
from windlass.data.records import selector
from windlass.errors import UserError
from windlass.spec.data import DataSection

HUB_PREFIX = "hf:"
CORPUS_PREFIX = "corpus:"
CORPORA = {"austen": "austen.jsonl.gz"}
FILE_BUILDERS = ("json", "text", "parquet", "csv", "arrow")  # `datasets` readers of files that data.files names
DEFAULT_CONFIGS = {"allenai/c4": "en"}
INDEX_NAME = "index.json"  # in a folder of token shards
FORMATS: dict[str, Literal["jsonl", "text", "parquet"]] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json": "jsonl",
    ".json.gz": "jsonl",
    ".txt": "text",
    ".txt.gz": "text",
    ".parquet": "parquet",
}


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


@dataclass(frozen=True)
class HubSource:
    """A `datasets` source."""

    path: str
    config: str | None
    split: str
    files: tuple[str, ...]
    text_field: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return HUB_PREFIX + self.path + (f" ({self.config})" if self.config else "") + f", split {self.split}"


Source = ShardSource | StoreShardSource | FileSource | HubSource


def parse_source(data: DataSection, part: Literal["train", "validation"]) -> Source:
    """The source that a run trains on, or the one it validates on."""
    if part == "train":
        return source_named(
            data.source, config=data.config, split=data.split, files=data.files, text_field=selector(data)
        )
    text = data.validation_source or ""
    if text.startswith(HUB_PREFIX) and text.removeprefix(HUB_PREFIX) in FILE_BUILDERS:
        raise UserError(
            f"data.validation_source={text} names no files: data.files are those of the training data",
            fix="data.validation_source=PATH    with the validation file itself",
        )
    return source_named(
        text,
        config=data.config if text == data.source else None,
        split=data.validation_split,
        files=(),
        text_field=selector(data),
    )


def source_named(
    text: str, *, config: str | None = None, split: str = "train", files: tuple[str, ...] = (), text_field: str = "text"
) -> Source:
    if text.startswith(HUB_PREFIX):
        return hub_source(text, config=config, split=split, files=files, text_field=text_field)
    if files:
        raise UserError(
            "data.files belongs to a hf: source", evidence=f"data.source={text}", fix=f"data.source={files[0]}"
        )
    if text.startswith(CORPUS_PREFIX):
        return corpus(text)
    if "://" in text:
        return store_source(text, text_field)
    return local_source(text, text_field)


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
        builders = ", ".join(HUB_PREFIX + one for one in FILE_BUILDERS)
        raise UserError(f"data.files is for {builders}, not for {text}", fix=f"data.source={HUB_PREFIX}json")
    return HubSource(path, config or DEFAULT_CONFIGS.get(path), split, files, text_field)


def corpus(text: str) -> FileSource:
    name = text.removeprefix(CORPUS_PREFIX)
    if name not in CORPORA:
        raise UserError(
            f"there is no corpus {name!r}",
            evidence=f"shipped corpora: {', '.join(CORPUS_PREFIX + one for one in CORPORA)}",
            fix=f"data.source={CORPUS_PREFIX}{next(iter(CORPORA))}",
        )
    return FileSource((assets() / CORPORA[name],), text_field="text", name=name)


def assets() -> Path:
    return Path(__file__).with_name("assets")


def store_source(url: str, text_field: str) -> StoreShardSource | FileSource:
    """Shards or text files in an object store."""
    from windlass.store.opening import bucket_and_prefix, is_store_url

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
    found = listed(url)
    if not found:
        raise nothing_at(url)
    files = [one for one in found if file_format(Path(one.name))]
    if not files:
        raise UserError(
            f"{url} holds neither token shards nor text files",
            evidence=f"it holds {', '.join(one.name for one in found[:5])}{', …' * (len(found) > 5)}",
            cause=f"shards have an {INDEX_NAME}, written last; text files end in {', '.join(FORMATS)}",
            fix="windlass data tokenize FILES -o FOLDER",
        )
    return FileSource(tuple(files), text_field, name=url)


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
        found = [Path(one) for one in sorted(glob.glob(str(path), recursive=True)) if Path(one).is_file()]
        if not found:
            raise UserError(f"no file matches {text}", evidence=nearest(path), fix=f"ls {path.parent}")
        return FileSource(tuple(readable(one) for one in found), text_field, name=text)
    raise UserError(f"there is no file or folder {text}", evidence=nearest(path), fix=missing_fix(path))


def folder_source(folder: Path, text_field: str) -> ShardSource | FileSource:
    if (folder / INDEX_NAME).exists():
        return ShardSource(folder, folder.resolve().name)
    files = tuple(path for path in sorted(folder.rglob("*")) if file_format(path) and path.is_file())
    if not files:
        names = sorted(path.name for path in folder.iterdir())
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise UserError(
            f"{folder} holds neither token shards nor text files" if names else f"{folder} is an empty folder",
            evidence=f"it holds {some}" if names else None,
            cause=f"shards have an {INDEX_NAME}, written last; text files end in {', '.join(FORMATS)}",
            fix="windlass data tokenize FILES -o FOLDER",
        )
    return FileSource(files, text_field, name=folder.resolve().name)


def file_format(path: Path) -> Literal["jsonl", "text", "parquet"] | None:
    name = path.name.lower()
    if name.startswith("."):
        return None
    return next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)


def readable(path: Path) -> Path:
    if file_format(path) is None:
        raise UserError(f"{path} is of no known kind", cause=f"text files end in {', '.join(FORMATS)}")
    return path


def nearest(path: Path) -> str | None:
    """What is there, closest in name to what is missing."""
    parent = path.parent
    if not parent.is_dir():
        missing = next(one for one in [*reversed(parent.parents), parent] if not one.is_dir())
        return f"the folder {missing} does not exist"
    near = closest(path)
    return f"the nearest name there is {near}" if near else None


def closest(path: Path) -> Path | None:
    if not path.parent.is_dir():
        return None
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], 1)
    return path.parent / near[0] if near else None


def missing_fix(path: Path) -> str | None:
    near = closest(path)
    if near:
        return f"data.source={near}"
    if not path.is_absolute() and str(path).count("/") == 1:
        return f"data.source={HUB_PREFIX}{path}    if the dataset of that name is meant"
    return None
