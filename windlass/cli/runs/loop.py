"""What the pod of a retry loop runs: `python -m windlass.cli.runs.loop`, which `windlass run --detach` leaves behind.

It is the loop of `windlass run`, as the pod's service account, with records that are kept in the cluster.
"""

from __future__ import annotations

import contextlib
import os
import sys

from windlass.cli.preparation import Prepared
from windlass.cli.runs.retry import is_pending
from windlass.cli.runs.run import Attempts, train
from windlass.common.files import read_json_lines
from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.targets.kubernetes import lookup
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.client import KubernetesTarget
from windlass.targets.kubernetes.loop import LoopRecords, ReplacedError
from windlass.targets.kubernetes.manifests.loop import loop_name
from windlass.targets.kubernetes.pod.interface import FAULTS_VARIABLE, LOOP_VARIABLE, PATIENCE_VARIABLE, RUN_FILE


def main() -> int:
    """0 once the run has ended, however it did; else Kubernetes starts the pod again, and it goes on."""
    name, api = os.environ[LOOP_VARIABLE], Api(access())
    folder = RunFolder(runs_root() / name)
    records = LoopRecords(api, folder, loop_name(name), os.environ["WINDLASS_POD_UID"])
    patience = float(os.environ[PATIENCE_VARIABLE])
    attempts = Attempts(RUN_FILE, [], os.environ.get(FAULTS_VARIABLE), patience, records, is_checked=True)
    try:
        records.claim()
        is_decided = is_pending(list(read_json_lines(folder.history)))
        with contextlib.suppress(UserError) if is_decided else contextlib.nullcontext():
            lookup.adopt(api, name)  # the job that is there, whether it runs or has failed meanwhile
        # a decision that the pod before this one wrote down is carried out first; else what is there is followed
        prepared = attempts.prepare() if is_decided else _as_it_is(folder)
        train(prepared, attempts, is_submitted=not is_decided)
        records.push()
    except ReplacedError:
        print("another pod is the retry loop of this run now", file=sys.stderr)
        return 1
    except UserError as error:
        print(error, file=sys.stderr)
        records.record("waits", why=error.what, fix=error.fix, **{"class": "unknown"})
        return int(error.exit_code) or 1
    return 0


def _as_it_is(folder: RunFolder) -> Prepared:
    return Prepared(folder.load_run(), folder, KubernetesTarget(), gathered=None, request=None, rows=[])


if __name__ == "__main__":
    sys.exit(main())
