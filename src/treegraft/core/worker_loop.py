"""The child process behind `workers`: answers requests by a script's function `answer`. Run by
file path, never imported.

A request is one line of JSON, `[request, processor seconds, seconds]`; an answer is one line of
JSON. The first line is "ready". The end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import runpy
import signal
import sys

MAX_MEMORY_BYTES = 2 << 30
"""An input may be made so that reading it takes any amount; the limit turns that into an error of
this process alone."""


def main(script: str) -> None:
    """Answers requests until the input ends."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    # Prints of a library must not stand among the answers.
    sys.stdout = sys.stderr
    answer = runpy.run_path(script)["answer"]
    sink.write(b'"ready"\n')
    sink.flush()
    for line in source:
        request, cpu_s, seconds = json.loads(line)
        # Both signals are unhandled and end this process: the first at its limit, the second should
        # the parent, which kills a late worker, be gone.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        found = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(json.dumps(found).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.argv[1])
