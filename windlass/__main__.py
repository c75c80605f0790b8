"""The program `windlass`. Ctrl-C while commands are still being imported ends it without a traceback."""

import sys


def main() -> None:
    try:
        from windlass.cli.main import main as run_and_exit

        run_and_exit()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
