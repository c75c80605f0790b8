"""`python claude-commands/manage_pytorchjob.py --help`: windlass.agent.manage_pytorchjob as a script."""

import sys

from windlass.agent import manage_pytorchjob
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(manage_pytorchjob))
