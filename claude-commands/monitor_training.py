"""`python claude-commands/monitor_training.py --help`: windlass.agent.monitor_training as a script."""

import sys

from windlass.agent import monitor_training
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(monitor_training))
