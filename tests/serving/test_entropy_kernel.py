"""The kernel of the extension `entropies`, computed by Triton's interpreter in the place of vLLM's
sampler where it stands in servers. Needs the environment of `make vllm-env`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import treegraft
from treegraft.core.errors import SettingError
from treegraft.policy.engine.vllm.build import find_python
from treegraft.settings.policy import VllmSettings

pytestmark = pytest.mark.slow

# vLLM's build for CPUs puts placeholders in Triton's place.
SCRIPT = """
import json, sys, torch, triton, triton.language, vllm.triton_utils as utils
utils.tl, utils.triton = triton.language, triton
from treegraft.extras.entropies import kernel
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
launches = []
class Counted:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        launches.append(grid)
        return self.kernel[grid]
kernel.entropy_kernel = Counted(kernel.entropy_kernel)
def drawn(logits, num):
    own = logits.argsort(dim=1)[:, 3]
    found = sampler.compute_topk_scores(logits, num, own)
    return found.logprobs, found.logprob_token_ids, found.selected_token_ranks
answers = []
for dtype, rows in json.load(sys.stdin):
    # Columns of a larger tensor, as where a vocabulary is padded.
    wide = torch.tensor(rows).to(getattr(torch, dtype))
    logits = wide[:, :-5]
    before = [drawn(logits, num) for num in (0, 1, 2, 20)]
    plain = sampler.compute_topk_scores
    kernel.measure()
    assert sampler.compute_topk_scores is rejection_sampler.compute_topk_scores is not plain
    after = [drawn(logits, num) for num in (0, 1, 2, 20)]
    sampler.compute_topk_scores = plain
    for old, new in zip(before, after):
        assert torch.equal(old[2], new[2])
        for column in (0, 1):
            assert torch.equal(old[column][:, :1], new[column][:, :1])
            assert torch.equal(old[column][:, 2:], new[column][:, 2:])
    assert torch.equal(before[1][0], after[1][0])
    assert torch.equal(after[2][0][:, 1], after[3][0][:, 1])
    # Three entries in a table by token.
    assert all(len(set(ids)) == 3 for ids in after[2][1].tolist())
    assert launches == [(len(rows),)] * 2 and not launches.clear()
    answers.append(after[2][0].tolist())
print(json.dumps(answers))
"""


def test_entropies_are_exact_in_one_launch() -> None:
    """Random rows over two blocks and a half, flat and sharp ones and one with a filter's holes,
    in float32 and bfloat16: entropies are torch's, and all other columns stay vLLM's."""
    try:
        python = find_python(VllmSettings(python=os.environ.get("TREEGRAFT_VLLM_PYTHON")))
    except SettingError as error:
        pytest.skip(str(error))
    logits = torch.randn(5, 10_000, generator=torch.Generator().manual_seed(0))
    logits *= torch.tensor([[0.01], [1.0], [4.0], [30.0], [4.0]])
    logits[4, 7:9000] = float("-inf")
    logits[3, 5] = 500.0
    asked = [("float32", logits.tolist()), ("bfloat16", logits.tolist())]
    done = subprocess.run(
        [python, "-c", SCRIPT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ
        | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(treegraft.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for (dtype, _), rows in zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True):
        logprobs = logits[:, :-5].to(getattr(torch, dtype)).double().log_softmax(dim=1)
        exact = torch.special.entr(logprobs.exp()).sum(dim=1)
        own = logprobs.gather(1, logprobs.argsort(dim=1)[:, 3:4])[:, 0]
        found = torch.tensor(rows, dtype=torch.float64)
        assert torch.allclose(found[:, 1], exact, atol=2e-5), (found[:, 1] - exact).abs().max()
        finite = own.isfinite()
        assert torch.allclose(found[finite, 0], own[finite], rtol=1e-5, atol=1e-4)
        assert exact.min() < 1e-6 and exact.max() > 9.2
