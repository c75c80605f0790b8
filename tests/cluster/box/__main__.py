"""python -m tests.cluster.box up|down|status|kubeconfig: a box for developers, which stays until `down`."""

from __future__ import annotations

import sys
import time

from tests.cluster.box import host, keeper, machine
from tests.cluster.box.api import Api
from tests.cluster.box.build import binary
from tests.cluster.box.layout import KUBECONFIG


def up() -> int:
    if keeper.running() is not None:
        print(f"a box is up already: export KUBECONFIG={KUBECONFIG}")
        return 0
    hold = keeper.start()
    begin = time.monotonic()
    try:
        machine.up()
    except BaseException:
        hold.release()
        raise
    hold.keep()
    print(
        f"up in {time.monotonic() - begin:.1f} s: export KUBECONFIG={KUBECONFIG} PATH={binary('kubectl').parent}:$PATH"
    )
    return 0


def down() -> int:
    keeper.stop()
    left = host.leftovers()
    print("\n".join(left) or "nothing is left")
    return 1 if left else 0


def status() -> int:
    if keeper.running() is None:
        left = host.leftovers()
        print("\n".join(["no box is up, but of a killed one there is left:", *left]) if left else "no box is up")
        return 1
    api = Api(KUBECONFIG)
    print(f"API server: {'ready' if api.ready() else 'not ready'}")
    print(f"nodes ready: {', '.join(sorted(machine.ready_nodes(api)))}")
    print(f"kept: {'yes' if keeper.KEPT.exists() else 'no, it belongs to a test session'}")
    return 0


def kubeconfig() -> int:
    print(KUBECONFIG)
    return 0


COMMANDS = {"up": up, "down": down, "status": status, "kubeconfig": kubeconfig}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m tests.cluster.box {'|'.join(COMMANDS)}")
    try:
        sys.exit(COMMANDS[sys.argv[1]]())
    except host.BoxError as error:
        sys.exit(f"error: {error}")
