"""`python claude-commands/manage_eks_cluster.py --help`: windlass.agent.manage_eks_cluster as a script."""

import sys

from windlass.agent import manage_eks_cluster
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(manage_eks_cluster))
