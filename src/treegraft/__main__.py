"""`python -m treegraft` and the command `treegraft`."""

import os
import sys


def stand_in_for_closed() -> None:
    """Puts /dev/null in the place of standard streams that were closed before the start: Python
    has None for them, and the next file that is opened would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The system gives the lowest free number, which is that of the stream.
            place = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(place, True)
            setattr(sys, name, os.fdopen(place, "r" if number == 0 else "w"))


def main() -> None:
    """Runs the command line; Ctrl-C while it is loaded ends it as quietly as later."""
    stand_in_for_closed()
    try:
        from treegraft.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
