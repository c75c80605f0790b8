"""One real cluster for all tests of this folder: the box, or the one that KUBECONFIG names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.bench import local_losses
from tests.cluster.box import machine
from tests.cluster.box.cluster import Cluster, Session
from tests.cluster.box.layout import KUBECONFIG
from tests.cluster.box.overlay import box_overlay

__all__ = ["box_overlay"]


@pytest.fixture(scope="session")
def box_session():
    """The box's life. Only for tests about that; all others ask for `cluster`."""
    named = os.environ.get("KUBECONFIG")
    if named and Path(named) != KUBECONFIG:
        pytest.skip(f"the tests run on the cluster of {named}")
    reason = machine.why_not()
    if reason:
        pytest.skip(reason)
    session = Session()
    try:
        session.start()
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def cluster(request):
    named = os.environ.get("KUBECONFIG")
    if named and Path(named) != KUBECONFIG:
        return Cluster(Path(named), box=False)
    request.getfixturevalue("box_session")
    return Cluster(KUBECONFIG, box=True)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Losses and gradient norms of the small run on three ranks of this machine."""
    return local_losses(tmp_path_factory.mktemp("local"), ranks=3)


@pytest.fixture
def namespace(cluster):
    """A namespace that only this test uses."""
    with cluster.namespace() as name:
        yield name
