"""Push an image, and believe it only when the registry itself shows the same digest."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import ExitCode, UserError
from windlass.image.build.builders import Builder
from windlass.image.build.logs import obstacle_in, stopped
from windlass.image.build.process import last_lines, stream
from windlass.image.registry.credentials import Credentials, in_memory
from windlass.image.registry.reference import ImageReference, is_loopback
from windlass.image.registry.registry import Manifest, Repository, denied, unreachable

DOCKER_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pushed:
    """An image in a registry."""

    image: ImageReference
    """By tag."""
    digest: str
    size: int
    """Bytes of all its layers, compressed."""
    already_there: bool = False

    @property
    def pinned(self) -> ImageReference:
        return self.image.pinned(self.digest)


def push_image(
    builder: Builder,
    image: str,
    destination: ImageReference,
    credentials: Credentials | None,
    *,
    plain_http: bool = False,
    replace: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> Pushed:
    """`replace`: a tag that is there and means another image is moved to this one."""
    if destination.tag is None:
        raise UserError(f"{destination} has no tag to push to", fix=f"{destination.name}:TAG")
    repository = Repository(destination, credentials, plain_http=plain_http)
    present = repository.manifest(destination.tag)
    already_there = present is not None and is_local_image(builder, image, present)
    if present and already_there:
        digest = present.digest
    elif present and not replace:
        raise UserError(
            f"{destination} is there already, and is another image",
            evidence=f"{present.digest} in the registry",
            cause="a tag that moves makes two runs of one run file different",
            fix="--tag NEW    or --replace, where the registry lets tags move",
        )
    else:
        digest = _push(builder, image, destination, credentials, plain_http, on_line)
    return Pushed(destination, digest, _verified(repository, destination, digest).size, already_there)


def look_up(pinned: ImageReference, credentials: Credentials | None, *, plain_http: bool = False) -> Pushed:
    """An image that was built elsewhere and is in its registry already: looked at there, and not taken on trust."""
    repository = Repository(pinned, credentials, plain_http=plain_http)
    manifest = repository.manifest(pinned.pointer)
    if manifest is None:
        raise UserError(f"{pinned} is not in the registry any more", fix="windlass image build")
    return Pushed(pinned, manifest.digest, manifest.size, already_there=True)


def _push(
    builder: Builder,
    image: str,
    destination: ImageReference,
    credentials: Credentials | None,
    plain_http: bool,
    on_line: Callable[[str], None] | None,
) -> str:
    registry = destination.registry or ""
    known = in_memory(credentials, registry, as_folder=builder.name == "docker")
    with tempfile.TemporaryDirectory() as folder, known as (place, inherit):
        digest_file = Path(folder) / "digest"
        insecure = plain_http or is_loopback(registry)
        output = ""
        for command in builder.push(image, str(destination), digest_file, place, plain_http=insecure):
            outcome = stream(command, on_line, inherit=inherit)
            output += outcome.stdout
            if not outcome.succeeded:
                raise _not_pushed(destination, outcome.stdout, known=credentials is not None)
        if digest_file.is_file():
            return digest_file.read_text().strip()
    digests: list[str] = DOCKER_DIGEST.findall(output)
    if not digests:
        raise UserError(f"{builder.name} did not say what it pushed", evidence=output[-400:], exit_code=ExitCode.FAILED)
    return digests[-1]


def _verified(repository: Repository, destination: ImageReference, digest: str) -> Manifest:
    """The registry is asked for the tag, for the digest, and for every part of the image."""
    by_tag, by_digest = repository.manifest(destination.tag or ""), repository.manifest(digest)
    if by_digest is None or by_digest.digest != digest or by_tag is None or by_tag.digest != digest:
        seen = by_tag.digest if by_tag else "nothing"
        raise UserError(
            f"{destination} was pushed as {digest}, but the registry has {seen}",
            cause="another push moved the tag meanwhile, or something between here and the registry changes images",
            fix="windlass image push    again",
            exit_code=ExitCode.FAILED,
        )
    for part in _parts(repository, by_digest):
        if not repository.has_blob(part):
            raise UserError(f"{destination}: the registry lost {part} of it", exit_code=ExitCode.FAILED)
    return by_digest


def _parts(repository: Repository, manifest: Manifest) -> Iterator[str]:
    values = manifest.values
    for entry in values.get("manifests", ()):
        if below := repository.manifest(entry["digest"]):
            yield from _parts(repository, below)
    if "config" in values:
        yield values["config"]["digest"]
        yield from (layer["digest"] for layer in values["layers"])


def is_local_image(builder: Builder, image: str, present: Manifest) -> bool:
    """Whether an image in the registry is the one that the builder has under this name."""
    local = builder.image_id(image)
    if local is None:
        raise UserError(f"{builder.name} has no image {image}", fix="windlass image build")
    # The id is the digest of the configuration; of the manifest where docker keeps images in containerd (docker 29).
    return f"sha256:{local}" in (present.digest, present.values.get("config", {}).get("digest"))


def _not_pushed(destination: ImageReference, output: str, *, known: bool) -> UserError:
    obstacle = obstacle_in(output)
    registry = destination.registry or ""
    if obstacle and obstacle.what == "a registry denies access":
        return denied(registry, destination.repository, obstacle.evidence or "", known=known)
    if obstacle and obstacle.what == "a registry does not answer":
        return unreachable(registry, obstacle.evidence or "")
    return stopped(f"{destination} was not pushed", output, last_lines(output))
