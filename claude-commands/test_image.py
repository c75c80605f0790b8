"""`python claude-commands/test_image.py --help`: windlass.agent.test_docker_image as a script."""

import sys

from windlass.agent import test_docker_image
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(test_docker_image))
