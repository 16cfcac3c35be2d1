"""`python -m treegraft.launch.rank`: another rank than 0 of a training that started its ranks
itself; its settings come through standard input."""

from __future__ import annotations

import json
import sys

from treegraft.launch.training import followed
from treegraft.policy.learn.torchrun import joined
from treegraft.settings.load import load_config


def main() -> None:
    """Joins the training and does rank 0's orders until its end."""
    config = load_config(json.loads(sys.stdin.buffer.read()))
    with joined(config) as ranks:
        assert ranks is not None
        followed(ranks, config)


if __name__ == "__main__":
    main()
