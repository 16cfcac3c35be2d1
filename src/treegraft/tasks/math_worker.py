"""The child process behind `math_pool`: reads pairs of answers, writes verdicts. Run by file path,
never imported.

One JSON array `[prediction, reference, processor seconds, seconds]` a line comes in on standard
input, one word a line goes out: "equal", "different" or "unparsed" (neither side's mathematics
could be read). The end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys

MAX_MEMORY_BYTES = 2 << 30
"""Towers of exponents are expanded by sympy; the limit turns them into an error of this process
alone."""


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _verdict(prediction: str, reference: str) -> str:
    from math_verify import parse, verify

    # Its own time-outs use SIGALRM in the main thread, which here belongs to our deadline.
    gold = parse(reference, parsing_timeout=None)
    target = parse(prediction, parsing_timeout=None)
    if not gold or not target:
        return "unparsed"
    return "equal" if verify(gold, target, timeout_seconds=None) else "different"


def main() -> None:
    """Answers requests until the input ends."""
    logging.disable(logging.CRITICAL)
    _limit_memory()
    _verdict("$\\frac{1}{2}$", "$0.5$")
    print("ready", flush=True)
    for line in sys.stdin:
        prediction, reference, cpu_seconds, seconds = json.loads(line)
        # Unhandled, both end this process: the first at the deadline, the second should the parent
        # be gone.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            verdict = _verdict(prediction, reference)
        except Exception:
            verdict = "unparsed"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(verdict, flush=True)


if __name__ == "__main__":
    main()
