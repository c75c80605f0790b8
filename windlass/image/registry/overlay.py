"""Changed code as one thin layer on a proven image, put into the registry without building or pulling anything."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from windlass.errors import UserError
from windlass.image.build.context import Context
from windlass.image.build.records import CODE, OVERLAY_CONTENT, OVERLAY_OF
from windlass.image.registry.reference import ImageReference
from windlass.image.registry.registry import DOCKER_MANIFEST, OCI_MANIFEST, Manifest, Repository

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


OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
SYSTEM = frozenset(
    map(PurePosixPath, ("/", "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/var", "/opt", "/root"))
)
LARGE = 200 * 2**20


@dataclass(frozen=True)
class Overlay:
    """What was put into the registry."""

    image: ImageReference
    """By tag."""
    digest: str
    proven: str
    """Digest of the image below."""
    files: int
    layer_bytes: int

    @property
    def pinned(self) -> ImageReference:
        return self.image.pinned(self.digest)

    def as_dict(self) -> dict[str, Any]:
        return {
            "image": str(self.image),
            "pinned": str(self.pinned),
            "digest": self.digest,
            "overlay_of": self.proven,
            "files": self.files,
            "layer_bytes": self.layer_bytes,
        }


def put_overlay(
    repository: Repository, proven: ImageReference, code: Path, *, to: str | None = None, keep: bool = False
) -> Overlay:
    """`code` as a layer at `to` in the image. `keep`: other files that the image has there stay."""
    bottom = _proven_image(repository, proven)
    place = _destination(repository, bottom, to)
    context = Context.open(code)
    size = sum((code / name).lstat().st_size for name in context.files)
    if size > LARGE:
        raise UserError(
            f"{code} holds {size / 2**20:.0f} MiB, which is no thin layer",
            cause="data or checkpoints are among the code",
            fix=f"write what is not code into {code / '.dockerignore'}",
        )
    layer = layer_of(code, context.files, place, replace=not keep)
    repository.put_blob(layer.digest, layer.data, len(layer.data))
    top = _with_layer(repository, bottom, layer, bottom.digest)
    tag = f"overlay-{bottom.digest[7:19]}-{layer.diff_id[7:19]}"
    repository.put_manifest(tag, top)
    return Overlay(proven.tagged(tag), top.digest, bottom.digest, len(context.files), len(layer.data))


def _proven_image(repository: Repository, proven: ImageReference) -> Manifest:
    """The image itself; of an overlay, the image below it, so that layers do not pile up edit by edit."""
    manifest = repository.manifest(proven.pointer)
    if manifest is None:
        raise UserError(
            f"{proven} is not in the registry",
            fix="windlass image push    puts it there",
            cause="an overlay needs it there",
        )
    labels = _labels(repository, _one_image(repository, manifest))
    below = labels.get(OVERLAY_OF)
    if below is None:
        return manifest
    found = repository.manifest(below)
    if found is None:
        raise UserError(f"{proven} is an overlay of {below}, which is no longer in the registry")
    return found


def _destination(repository: Repository, bottom: Manifest, to: str | None) -> PurePosixPath:
    place = to or _labels(repository, _one_image(repository, bottom)).get(CODE)
    if place is None:
        raise UserError(
            "where in the image does the code belong?",
            cause=f"the image has no label {CODE}, which an image that windlass planned has",
            fix="--to /workspace",
        )
    path = PurePosixPath(place)
    if not path.is_absolute() or ".." in path.parts:
        raise UserError(f"--to {place}: an absolute path in the image is needed", fix="--to /workspace")
    if path in SYSTEM:
        raise UserError(f"--to {place} would hide what the image has there", fix=f"--to {path / 'workspace'}")
    return path


def _with_layer(repository: Repository, manifest: Manifest, layer: Layer, proven: str) -> Manifest:
    """The manifest with the layer on top; of an index, every image in it, for the layer suits every platform."""
    values = manifest.values
    if manifest.is_index:
        kept = []
        for part in values["manifests"]:
            if part.get("platform", {}).get("os") == "unknown":  # an attestation of the image below, not of this one
                continue
            below = repository.manifest(part["digest"])
            assert below is not None
            top = _with_layer(repository, below, layer, proven)
            repository.put_manifest(top.digest, top)
            kept.append({**part, "digest": top.digest, "size": len(top.body), "mediaType": top.media_type})
        return Manifest(_json({**values, "manifests": kept}), manifest.media_type)
    if manifest.media_type not in (OCI_MANIFEST, DOCKER_MANIFEST):
        raise UserError(f"an image of type {manifest.media_type} takes no layers")
    config = json.loads(repository.blob(values["config"]["digest"]))
    config["rootfs"]["diff_ids"] = [*config["rootfs"]["diff_ids"], layer.diff_id]
    note = {"created": "1970-01-01T00:00:00Z", "created_by": "windlass image overlay", "comment": f"on {proven}"}
    config["history"] = [*config.get("history", []), note]
    inner = config.setdefault("config", {})
    inner["Labels"] = {**(inner.get("Labels") or {}), OVERLAY_OF: proven, OVERLAY_CONTENT: layer.diff_id}
    body = _json(config)
    digest = Manifest(body, "").digest
    repository.put_blob(digest, body, len(body))
    kind = OCI_LAYER if manifest.media_type == OCI_MANIFEST else DOCKER_LAYER
    changed = {
        **values,
        "config": {**values["config"], "digest": digest, "size": len(body)},
        "layers": [*values["layers"], {"mediaType": kind, "digest": layer.digest, "size": len(layer.data)}],
    }
    return Manifest(_json(changed), manifest.media_type)


def _one_image(repository: Repository, manifest: Manifest) -> Manifest:
    if not manifest.is_index:
        return manifest
    found = repository.manifest(manifest.values["manifests"][0]["digest"])
    assert found is not None
    return found


def _labels(repository: Repository, manifest: Manifest) -> dict[str, str]:
    config = json.loads(repository.blob(manifest.values["config"]["digest"]))
    return (config.get("config") or {}).get("Labels") or {}


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
