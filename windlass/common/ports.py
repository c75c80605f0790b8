"""Ports that nothing listens on."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A TCP port that is free now on `host` ("" means every address of this machine)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
