"""The box's container images, assembled from this machine's own files: one small layer, no registry.

The trainer image is a shell and an empty skeleton of Debian's folders. Python and torch are not copied into it: pods
mount the interpreter, the environment and the repository from the host, read-only (see overlay.py), because three
copies of torch would take longer than all tests together.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.cluster.box.host import SEARCH_PATH, BoxError
from tests.cluster.box.layout import PAUSE_IMAGE, TRAINER_IMAGE

SYSTEM_IMAGE = "docker.io/windlass/system:box"  # the same files, for pods that must not be root
NOBODY = 65532
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write(tarball: Path, pause: Path) -> None:
    """One OCI archive with every image, for `ctr images import`."""
    skeleton, sandbox = _skeleton(), _layer({"pause": pause.read_bytes()})
    images: dict[str, tuple[list[bytes], dict[str, Any]]] = {
        PAUSE_IMAGE: ([sandbox], {"Entrypoint": ["/pause"]}),
        TRAINER_IMAGE: ([skeleton], {"Env": [PATH], "Cmd": ["sh"]}),
        SYSTEM_IMAGE: ([skeleton], {"Env": [PATH], "User": str(NOBODY)}),
    }
    blobs: dict[str, bytes] = {}
    manifests = [_image(name, layers, config, blobs) for name, (layers, config) in images.items()]
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
    files |= {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    tarball.write_bytes(_layer(files))


def _image(name: str, layers: list[bytes], config: dict[str, Any], blobs: dict[str, bytes]) -> dict[str, Any]:
    def put(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    compressed = [put(gzip.compress(layer, 1, mtime=0), "layer.v1.tar+gzip") for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]}
    described = put(
        _json({"architecture": "amd64", "os": "linux", "config": config, "rootfs": rootfs}), "config.v1+json"
    )
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = put(
        _json({"schemaVersion": 2, "mediaType": kind, "config": described, "layers": compressed}), "manifest.v1+json"
    )
    platform = {"architecture": "amd64", "os": "linux"}
    return manifest | {"platform": platform, "annotations": {"io.containerd.image.name": name}}


def busybox() -> Path | None:
    """A shell with everything, in one file that needs no other."""
    found = shutil.which("busybox", path=SEARCH_PATH)
    # one that needs shared libraries names its loader at the very beginning
    return Path(found) if found and b"/ld-linux" not in Path(found).read_bytes()[:4096] else None


def _skeleton() -> bytes:
    shell = busybox()
    if shell is None:
        raise BoxError("a static busybox is needed (Debian: busybox-static)")
    applets = subprocess.run([shell, "--list"], capture_output=True, text=True, check=True).stdout.split()
    files: dict[str, bytes | str] = {
        "usr/bin/busybox": shell.read_bytes(),
        "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}::/tmp:/bin/sh\n".encode(),
        "etc/group": f"root:x:0:\nnobody:x:{NOBODY}:\n".encode(),
        "etc/nsswitch.conf": b"hosts: files dns\n",
    }
    # As in Debian, so that the host's /usr can be mounted over this one.
    files |= {name: f"-> usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    files |= {f"usr/bin/{applet}": "-> busybox" for applet in applets if applet != "busybox"}
    folders = (
        "tmp",
        "root",
        "run",
        "var/tmp",
        "proc",
        "sys",
        "dev",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "usr/local/bin",
    )
    return _layer(files, folders)


def _layer(files: dict[str, Any], folders: tuple[str, ...] = ()) -> bytes:
    """A tar file; a string is where a link points, a folder called tmp is everybody's."""
    buffer = io.BytesIO()
    parents = {parent for path in (*files, *folders) for parent in Path(path).parents}
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in sorted((parents | {Path(name) for name in folders}) - {Path()}):
            entry = tarfile.TarInfo(str(folder))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder.name == "tmp" else 0o755
            archive.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content.removeprefix("-> ")
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content), 0o755 if content[:4] == b"\x7fELF" else 0o644
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
