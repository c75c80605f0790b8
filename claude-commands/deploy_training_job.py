"""`python claude-commands/deploy_training_job.py --help`: windlass.agent.deploy_training_job as a script."""

import sys

from windlass.agent import deploy_training_job
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(deploy_training_job))
