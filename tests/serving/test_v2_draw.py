"""The draw of vLLM's V2 runner, computed by Triton's interpreter: a function of seed, position and
logits alone, equal to a slow loop. Needs the environment of `make vllm-env`."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest
import torch

from treegraft.core.errors import SettingError
from treegraft.policy.engine.vllm.build import find_python
from treegraft.settings.policy import VllmSettings

pytestmark = pytest.mark.slow

VOCABULARY = 2500
"""Three of the kernel's blocks, the last one cut."""
ROWS = [(3, 5, 1.0), (2**62 + 11, 5, 1.0), (3, 5, 0.7), (99, 7, 0.0), (3, 6, 1.0), (2**40, 9**5, 1)]
"""Seed, position, temperature."""

# vLLM's build for CPUs puts placeholders in Triton's place.
SCRIPT = """
import json, sys, torch, triton, triton.language, vllm.triton_utils as utils
utils.tl, utils.triton = triton.language, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
rows, logits = json.load(sys.stdin)
seeds, positions, temperatures = map(torch.tensor, zip(*rows))
logits = torch.tensor(logits)
def draw(own):
    where = torch.tensor(own, dtype=torch.int32)
    return gumbel_sample(
        logits[own], where, temperatures, seeds, positions[own], True, False).tolist()
every = list(range(len(rows)))
print(json.dumps([draw(every), [draw([n])[0] for n in every], draw(every[::-1])[::-1]]))
"""


def _mixed(state: int, word: int) -> int:
    """One round of MurmurHash3 (Appleby, 32 bits)."""
    low = 0xFFFFFFFF
    word = word * 0xCC9E2D51 & low
    word = (word << 15 | word >> 17) & low
    state ^= word * 0x1B873593 & low
    state = (state << 13 | state >> 19) & low
    return (state * 5 + 0xE6546B64) & low


def _gumbel(seed: int, position: int, token: int) -> float:
    state = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32, position, token):
        state = _mixed(state, word)
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    uniform = ((state ^ state >> 16) + 0.5) / 2**32
    return float(-np.log(-np.log1p(-uniform)))


def test_the_draw_of_v2_is_a_function_of_seed_position_and_logits() -> None:
    """In one batch, alone, and in another order, a row draws the token of the loop."""
    try:
        python = find_python(VllmSettings(python=os.environ.get("TREEGRAFT_VLLM_PYTHON")))
    except SettingError as error:
        pytest.skip(str(error))
    logits = 3 * torch.randn(len(ROWS), VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = []
    for (seed, position, temperature), row in zip(ROWS, logits.double().numpy(), strict=True):
        scores = row
        if temperature:
            noise = [_gumbel(seed, position, token) for token in range(VOCABULARY)]
            scores = row / temperature + noise
        expected.append(int(np.argmax(scores)))
    done = subprocess.run(
        [python, "-c", SCRIPT],
        input=json.dumps([ROWS, logits.tolist()]),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [expected] * 3
    assert len(set(expected)) == len(ROWS)
