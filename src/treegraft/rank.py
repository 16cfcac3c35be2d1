"""`python -m treegraft.rank MEETING COMMAND`: another rank than 0 of a training that started its
ranks itself; its settings come through standard input."""

from __future__ import annotations

import json
import os
import sys

from treegraft.policy.learn.torchrun import MEETING
from treegraft.settings.load import load_config
from treegraft.train import sft, train

if __name__ == "__main__":
    os.environ[MEETING] = sys.argv[1]
    work = sft if sys.argv[2] == "sft" else train
    work(load_config(json.loads(sys.stdin.buffer.read())), display=False)
