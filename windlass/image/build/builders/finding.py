"""Which builder this machine has."""

from __future__ import annotations

from windlass.errors import UserError
from windlass.image.build.builders.buildah import Buildah
from windlass.image.build.builders.docker import Docker
from windlass.image.build.builders.podman import Podman
from windlass.image.build.builders.protocol import Builder

KINDS = ("docker", "podman", "buildah")
IN_THE_CLOUD = "codebuild"


def all_builders() -> list[Builder]:
    """In the order in which they are tried."""
    return [Docker(), Podman(), Buildah()]


def find_builder(name: str | None = None) -> Builder:
    """The named builder, or the first that works here; an error says why each does not."""
    reasons: list[str] = []
    for builder in all_builders():
        if name not in (None, builder.name):
            continue
        reason = builder.why_not()
        if reason is None:
            return builder
        reasons.append(f"{builder.name:<9} {reason}")
    raise UserError(
        f"{name} cannot be used here" if name else "there is no builder on this machine",
        evidence="\n".join(reasons),
        cause=None if name else "an image is built by docker buildx, podman or buildah, or by AWS CodeBuild",
        fix="apt-get install buildah\nwindlass image build --builder codebuild    builds in AWS",
    )
