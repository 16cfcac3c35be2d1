"""`python -m treegraft.launch.rank MEETING`: another rank than 0 of a training that started its
ranks itself; its settings come through standard input."""

from __future__ import annotations

import json
import sys
from contextlib import closing

from treegraft.launch.training import followed
from treegraft.policy.learn.ranks import Ranks
from treegraft.settings.load import load_config

if __name__ == "__main__":
    config = load_config(json.loads(sys.stdin.buffer.read()))
    with closing(Ranks(config, sys.argv[1])) as ranks:
        followed(ranks, config)
