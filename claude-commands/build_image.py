"""`python claude-commands/build_image.py --help`: windlass.agent.build_docker_image as a script."""

import sys

from windlass.agent import build_docker_image
from windlass.agent.scripts import main

if __name__ == "__main__":
    sys.exit(main(build_docker_image))
