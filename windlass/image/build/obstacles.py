"""Failures that no Dockerfile is to blame for: the disk, the registry, the rights of this machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import ExitCode, UserError


@dataclass(frozen=True)
class Obstacle:
    pattern: re.Pattern[str]
    what: str
    cause: str
    fix: str


def _obstacle(pattern: str, what: str, cause: str, fix: str) -> Obstacle:
    return Obstacle(re.compile(pattern, re.IGNORECASE), what, cause, fix)


OBSTACLES: Sequence[Obstacle] = (
    _obstacle(
        r"no space left on device|ENOSPC|disk quota exceeded",
        "the disk is full",
        "layers, the builder's cache and pip's need room: an image with torch takes about 15 GB while it is built",
        "df -h    shows which disk\npodman system prune    or docker builder prune    frees what no image uses",
    ),
    _obstacle(
        r"unauthorized|authentication required|no basic auth credentials|access to the resource is denied|"
        r"requested access .* denied|denied: ",
        "a registry denies access",
        "the credentials are missing, wrong or expired",
        "docker login REGISTRY    or podman login REGISTRY",
    ),
    _obstacle(
        r"manifest unknown|manifest for \S+ not found|name unknown|repository name not known|image not known",
        "a base image does not exist",
        "its name or tag is wrong, or it is for other platforms only",
        "windlass image plan RUN    names a base image that exists",
    ),
    _obstacle(
        r"(pinging container registry|initializing source docker://|failed to do request|error pinging|dial tcp)"
        r".*(connection refused|no such host|i/o timeout|network is unreachable|server misbehaving|"
        r"deadline exceeded|EOF)",
        "a registry does not answer",
        "it is down, its name is wrong, or the network does not lead there",
        "curl -i https://REGISTRY/v2/    shows what it says",
    ),
    _obstacle(
        r"setrlimit|newuidmap|unshare\(CLONE|error creating overlay mount|mount .* operation not permitted|"
        r"permission denied while trying to connect to the docker",
        "this user may not run containers here",
        "the builder needs rights that this machine or container does not give",
        "BUILDAH_ISOLATION=chroot windlass image build --builder buildah    needs the fewest\n"
        "windlass image build --builder codebuild    builds in AWS",
    ),
    _obstacle(
        r"signal: killed|exit (?:status|code:?) 137|OOMKilled|Killed\s*$",
        "the build ran out of memory",
        "a process of the build was killed, most often while it compiled an extension with many jobs",
        "ENV MAX_JOBS=2    in the Dockerfile, before the extension is compiled",
    ),
)


def obstacle_in(log: str) -> UserError | None:
    """The first obstacle that the log names, looked for from its end."""
    lines = log.splitlines()
    for line in reversed(lines[-200:]):
        for one in OBSTACLES:
            if one.pattern.search(line):
                return UserError(
                    one.what, evidence=line.strip()[:400], cause=one.cause, fix=one.fix, exit_code=ExitCode.FAILED
                )
    return None
