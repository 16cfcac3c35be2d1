"""Passes of the engine and the learner on another device than the CPU, without numbers: see
`tests.support.shapes_only`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.forked import Forked

ROOT = Path(__file__).parents[2]
pytest.importorskip("torch.utils.backend_registration", reason="torch has no devices of Python's")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make card`")
def test_no_pass_mixes_devices_and_decoding_waits_for_nothing() -> None:
    with Forked(["tests.support.shapes_only"], cwd=ROOT, stderr=subprocess.STDOUT) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    found = json.loads(said.splitlines()[-1])
    parts = found["parts"]
    assert len(parts) == 8
    for name, said in parts.items():
        # An operation on two devices has to be seen, or the rest would prove nothing.
        if name.endswith("mix"):
            assert re.search("two (different )?devices,? card:0", said), f"{name}: {said}"
        else:
            assert not said, f"{name}: {said}"
    # Once a pack or an optimiser step, never once a token: two of each in two epochs.
    assert 0 < max(found["waits"].values()) <= 24, found["waits"]
