"""What the pod of a retry loop runs: `python -m windlass.cli.runs.loop`, which `windlass run --detach` leaves behind.

It is the loop of `windlass run`, as the pod's service account, with records that are kept in the cluster.
"""

from __future__ import annotations

import os
import sys

from windlass.cli.runs.attempts import Attempts, go_on
from windlass.cli.runs.retry import is_pending
from windlass.common.files import read_json_lines
from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.targets.kubernetes import lookup
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.loop import LoopNotices, LoopRecords, ReplacedError
from windlass.targets.kubernetes.manifests.loop import loop_name
from windlass.targets.kubernetes.pod.interface import FAULTS_VARIABLE, PATIENCE_VARIABLE, RUN_FILE
from windlass.targets.protocol import LOOP_VARIABLE


def main() -> int:
    """0 once the run has ended, however it did; else Kubernetes starts the pod again, and it goes on."""
    name, api = os.environ[LOOP_VARIABLE], Api(access())
    folder = RunFolder(runs_root() / name)
    records = LoopRecords(api, folder, loop_name(name), os.environ["WINDLASS_POD_UID"])
    patience = float(os.environ[PATIENCE_VARIABLE])
    attempts = Attempts(RUN_FILE, [], os.environ.get(FAULTS_VARIABLE), patience, records=records, is_checked=True)
    notices = None
    try:
        records.claim()
        notices = LoopNotices(api, folder, loop_name(name))
        if any(run.name == name for run in lookup.runs(api)):
            lookup.adopt(api, name)
        elif not is_pending(list(read_json_lines(folder.history))):
            return 0  # somebody deleted the job: there is nothing to decide
        go_on(attempts, folder)
        records.push()
        notices.finish()
    except ReplacedError:
        print("another pod is the retry loop of this run now", file=sys.stderr)
        return 1
    except UserError as error:
        print(error, file=sys.stderr)
        records.record("waits", why=error.what, fix=error.fix, **{"class": "unknown"})
        if notices is not None:
            notices.finish()
        return int(error.exit_code) or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
