"""Why a job failed, waits or hangs, told from facts: pods, events, nodes, Slurm's accounting and the logs of its ranks.

Pure: facts in, a verdict out; nothing here talks to a cluster.
"""

from windlass.diagnose.facts import Facts
from windlass.diagnose.verdict import Verdict, diagnose

__all__ = ["Facts", "Verdict", "diagnose"]
