"""Names of images: registry, repository, tag and digest, taken apart; and written into a run file."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

import yaml

from windlass.errors import UserError


def pin(text: str, name: str) -> str:
    """The text of a run file with `image.name` set to `name`."""
    changed = _edit(text, name)
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(changed)
    expected = {**before, "image": {**(before.get("image") or {}), "name": name}}
    if after != expected:  # an edit of text is trusted only when it reads back as what was meant
        raise UserError("the run file cannot be edited without changing more than the image", fix=f"image.name={name}")
    return changed


def _edit(text: str, name: str) -> str:
    def write(new: str, start: int, end: int) -> str:
        return text[:start] + new + text[end:]

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(
            "the run file is no mapping of sections", fix="windlass init my.yaml    writes one to start from"
        )
    section = _value(root, "image") if root else None
    if section is None and root and root.flow_style:
        start = root.start_mark.index + 1
        return write(f"image: {{name: {name!r}}}{', ' if root.value else ''}", start, start)
    if section is None:
        newline = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{newline}image:\n  name: {name}\n"
    start, end = section.start_mark.index, section.end_mark.index
    if not isinstance(section, yaml.MappingNode):  # `image:` alone
        return write(f"{'' if section.value else ' '}{{name: {name!r}}}", start, end)
    if current := _value(section, "name"):
        new = repr(name) if section.flow_style else name
        return write(new, current.start_mark.index, current.end_mark.index)
    if section.flow_style:
        return write(f"name: {name!r}{', ' if section.value else ''}", start + 1, start + 1)
    return write(f"name: {name}\n{' ' * section.start_mark.column}", start, start)


def _value(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in mapping.value if name.value == key), None)


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
