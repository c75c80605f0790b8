"""What a pod is given: paths, variables, ports and files. Manifests write them, the pod reads them."""

from __future__ import annotations

RUNS = "/windlass/runs"
RUN_FILE = "/windlass/run/run.yaml"
CARRIED = "/windlass/carried"
SCRATCH = "/windlass/scratch"
SHARED_VARIABLE = "WINDLASS_SHARED"
HOST_VARIABLE, PORT_VARIABLE = "WINDLASS_MEETING_HOST", "WINDLASS_MEETING_PORT"
NODES_VARIABLE, MIN_NODES_VARIABLE = "WINDLASS_NODES", "WINDLASS_MIN_NODES"
INDEX_VARIABLE, ROLE_VARIABLE = "WINDLASS_NODE_INDEX", "WINDLASS_NODE_ROLE"
SUBMISSION_VARIABLE = "WINDLASS_SUBMISSION"
AGAIN = "-again"  # how a submission ends that a decision made, and no person
TOKEN_VARIABLE = "WINDLASS_TOKEN"  # secret of the submission: the pods prove to each other that they know it
PATIENCE_VARIABLE, FAULTS_VARIABLE = "WINDLASS_LOOP_PATIENCE", "WINDLASS_LOOP_FAULTS"
LAUNCHER_VARIABLE = "WINDLASS_LAUNCHER"
POD_VARIABLES = {
    "WINDLASS_POD": "metadata.name",
    "WINDLASS_POD_UID": "metadata.uid",
    "WINDLASS_POD_IP": "status.podIP",
    "WINDLASS_NODE": "spec.nodeName",
}
COORDINATOR_PORT = 29400
HYPERPOD_AGENT_PORT = 8080
CODE, WINDLASS = "code", "windlass"  # the archives a job can carry
BOOTSTRAP = "bootstrap.py"
DIGEST_KEY = "digest"
