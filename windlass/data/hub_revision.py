"""Which commit of a dataset is read: asked for once, so that a fetch that takes days reads one version of it."""

from __future__ import annotations

from dataclasses import replace

from windlass.catalog.hub import import_hub, patiently
from windlass.data.sources import FILE_BUILDERS, HubSource
from windlass.errors import UserError


def pinned(source: HubSource) -> HubSource:
    """The source at the commit that it is at now; an unknown or closed dataset is an error here."""
    if source.path in FILE_BUILDERS or source.revision:
        return source
    hub = import_hub(source.path)
    if hub.constants.is_offline_mode():
        raise UserError(f"{source.name} is on a hub, and HF_HUB_OFFLINE forbids asking it", fix="unset HF_HUB_OFFLINE")

    def ask() -> str:
        facts = hub.HfApi().dataset_info(source.path, timeout=20)
        if facts.gated:
            hub.HfApi().auth_check(source.path, repo_type="dataset")
        return str(facts.sha)

    return replace(source, revision=patiently(ask, source.path, "dataset"))
