"""Labels of an image, so that it says itself where it came from. Pure."""

from __future__ import annotations

from windlass.image.build.tags import Commit

OCI = "org.opencontainers.image"
OURS = "dev.windlass"
CONTENT = f"{OURS}.content"
CODE = f"{OURS}.code"
OVERLAY_OF = f"{OURS}.overlay-of"
OVERLAY_CONTENT = f"{OURS}.overlay-content"


def labels_for(*, title: str, tag: str, commit: Commit | None, content: str, bases: tuple[str, ...]) -> dict[str, str]:
    """OCI's keys where it has one. No time of day: the same files shall make the same labels."""
    labels = {f"{OCI}.title": title, f"{OCI}.version": tag, CONTENT: content}
    if bases:
        labels[f"{OCI}.base.name"] = bases[-1]
    if commit:
        labels[f"{OCI}.revision"] = commit.revision + ("-dirty" if commit.changed else "")
        if commit.source:
            labels[f"{OCI}.source"] = commit.source
    return labels
