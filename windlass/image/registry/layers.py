"""A folder as a layer of an image: the same files always give the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

OPAQUE = ".wh..wh..opq"  # in a layer: what lower layers have in this folder is not there


@dataclass(frozen=True)
class Layer:
    """Compressed bytes, and the two digests by which images name them."""

    data: bytes
    diff_id: str
    """Of the uncompressed archive."""

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"


def layer_of(folder: Path, names: Iterable[str], to: PurePosixPath, *, replace: bool) -> Layer:
    """The named files below `to`. With `replace`, what earlier layers have there and `folder` has not is gone."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        made: set[PurePosixPath] = set()
        target = PurePosixPath(str(to).lstrip("/"))
        _add_folders(tar, target, made)
        if replace:
            _add(tar, target / OPAQUE, tarfile.REGTYPE, 0o644)
        for name in sorted(names):
            place = target / name
            _add_folders(tar, place.parent, made)
            _add_file(tar, folder / name, place)
    raw = archive.getvalue()
    # mtime=0 and no name: gzip would write the time into the header, and the digest would change with it.
    return Layer(gzip.compress(raw, compresslevel=6, mtime=0), f"sha256:{hashlib.sha256(raw).hexdigest()}")


def _add_folders(tar: tarfile.TarFile, folder: PurePosixPath, made: set[PurePosixPath]) -> None:
    for one in (*reversed(folder.parents), folder):
        if str(one) != "." and one not in made:
            made.add(one)
            _add(tar, one, tarfile.DIRTYPE, 0o755)


def _add_file(tar: tarfile.TarFile, source: Path, place: PurePosixPath) -> None:
    if source.is_symlink():
        _add(tar, place, tarfile.SYMTYPE, 0o777, link=os.readlink(source))
        return
    mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
    _add(tar, place, tarfile.REGTYPE, mode, data=source.read_bytes())


def _add(tar: tarfile.TarFile, place: PurePosixPath, kind: bytes, mode: int, data: bytes = b"", link: str = "") -> None:
    info = tarfile.TarInfo(str(place))
    info.type, info.mode, info.size, info.linkname = kind, mode, len(data), link
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    tar.addfile(info, io.BytesIO(data))
