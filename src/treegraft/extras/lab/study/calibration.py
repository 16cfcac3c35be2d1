"""A fixed small computation, by whose seconds those of different machines can be compared."""

from __future__ import annotations

import hashlib
import time

NUM_PRODUCTS, NUM_HASHES = 1500, 300_000
"""About as much matrix arithmetic as plain Python, as in the runs of small models."""


def calibrate() -> float:
    """Returns the CPU seconds that the computation takes in this process: some tenths. Beside other
    work on the same machine it takes longer, as runs do."""
    # Here, so that commands that study nothing start without it.
    import numpy as np

    matrix = np.full((128, 128), 1 / 128, dtype=np.float32)
    digest = b""
    began = time.process_time()
    for _ in range(NUM_PRODUCTS):
        matrix = matrix @ matrix
    for number in range(NUM_HASHES):
        digest = hashlib.blake2b(digest + number.to_bytes(4), digest_size=8).digest()
    return time.process_time() - began
