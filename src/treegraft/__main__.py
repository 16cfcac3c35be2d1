"""`python -m treegraft` and the command `treegraft`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is loaded ends it as quietly as later."""
    try:
        from treegraft.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
