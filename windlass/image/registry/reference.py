"""Names of images: registry, repository, tag and digest, taken apart."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from windlass.errors import UserError

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
HUB = "docker.io"


@dataclass(frozen=True)
class ImageReference:
    """`registry/repository:tag@digest`. An image without a registry is one of this machine."""

    registry: str | None
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        rest, _, digest = text.strip().partition("@")
        first, slash, others = rest.partition("/")
        registry: str | None = None
        if slash and ("." in first or ":" in first or first == "localhost"):
            registry, rest = first, others
        path, colon, tag = rest.rpartition(":")
        if not colon:
            path, tag = rest, ""
        wrong = (
            "the digest is not sha256: and 64 hexadecimal digits"
            if "@" in text and not DIGEST.fullmatch(digest)
            else "a repository is lower-case letters and digits, with . _ - / between them"
            if not REPOSITORY.fullmatch(path)
            else "a tag is up to 128 letters, digits, '_', '.' or '-'"
            if colon and not TAG.fullmatch(tag)
            else None
        )
        if wrong:
            raise UserError(f"{text!r} is no image name", cause=wrong, fix="registry.example.com/team/train:v1")
        return cls(registry, path, tag or None, digest or None)

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def name(self) -> str:
        """Without tag and digest."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    def tagged(self, tag: str) -> ImageReference:
        return replace(self, tag=tag, digest=None)

    def pinned(self, digest: str) -> ImageReference:
        """The name that can mean one image only. Without the tag: not every tool takes both."""
        return replace(self, tag=None, digest=digest)

    @property
    def pointer(self) -> str:
        """What a registry is asked for."""
        return self.digest or self.tag or "latest"


def is_loopback(registry: str) -> bool:
    """Registries on this machine speak plain HTTP, as every container tool has it."""
    host = registry.rsplit(":", 1)[0] if not registry.endswith("]") else registry
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
