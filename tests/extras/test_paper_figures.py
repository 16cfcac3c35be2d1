"""The papers' figures from lines of a study: metrics of each update, costs, distances by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras.test_study import SMALL, written
from tests.support.error_codes import raises_code
from tests.support.trees import Part, build_tree

from treegraft.core.types import StepContent, Tree
from treegraft.extras.lab.report.records import read_study
from treegraft.extras.lab.study.diversity import distance
from treegraft.extras.lab.study.figures import PAPERS, costs, draw
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.pool import PORTABLE
from treegraft.extras.lab.study.results import by_update
from treegraft.extras.lab.study_command import _draw

CALLS, TOKENS = "rollout/num_tool_calls", "rollout/num_sampled_tokens"


def line(method: str, seed: int, seconds: float, calls: int) -> dict[str, Any]:
    """A run of two updates."""
    spent = [{"update": n, "accuracy": 0.5, CALLS: calls * n, TOKENS: 10.0 * n} for n in (0, 2)]
    updates = {
        "update": [1, 2],
        CALLS: [calls, calls],
        "learn/entropy": [0.5, None],
        "time/rollout_s": [seconds, 3 * seconds],
    }
    return {"method": method, "seed": seed, "world": "w", "curve": spent, "updates": updates}


LINES = [line("GRPO", 0, 1.0, 4), line("GRPO", 1, 2.0, 4), line("RAPO", 0, 3.0, 6)]


def test_metrics_of_updates_are_columns() -> None:
    lines = [
        {"update": 0.0, "learn/entropy": 9.0},
        {"update": 1.0, "learn/entropy": 0.123456789, CALLS: 3.0, "reward/mean": 1.0},
        {"update": 2.0, CALLS: 4.0, "environment/num_replayed_calls": 8.0},
    ]
    assert by_update(lines, {2: {"diversity/distance": 0.25}}) == {
        "update": [1, 2],
        CALLS: [3.0, 12.0],
        "learn/entropy": [0.123457, None],
        "diversity/distance": [None, 0.25],
    }


def test_a_line_s_updates_take_the_place_of_its_sums(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    path.write_text(json.dumps(LINES[0]))
    (record,) = read_study(path)
    assert [{**one} for one in record.lines] == [
        {"update": 0.0, "eval/accuracy_sampled": 0.5, TOKENS: 0.0},
        {"update": 1.0, CALLS: 4.0, "learn/entropy": 0.5, "time/rollout_s": 1.0},
        {"update": 2.0, "eval/accuracy_sampled": 0.5, TOKENS: 20.0, CALLS: 4.0}
        | {"time/rollout_s": 3.0},
    ]
    path.write_text(json.dumps({**LINES[0], "updates": {"update": "x"}}))
    with raises_code("study-line-invalid"):
        list(read_study(path))


def test_costs_of_an_update_beside_the_baseline_s() -> None:
    """GRPO: (1 + 3) / 2 and (2 + 6) / 2 seconds, mean 3; RAPO 6. Tokens: 20 over two updates."""
    heads, grpo, rapo = costs([LINES[2], *LINES[:2]], "GRPO")
    assert heads == ("arm", "rollout s", "learning s", "CPU s", "calls", "tokens")
    assert grpo == ("GRPO", "3 (1.00 x)", "", "", "4 (1.00 x)", "10 (1.00 x)")
    assert rapo == ("RAPO", "6 (2.00 x)", "", "", "6 (1.50 x)", "10 (1.00 x)")


def test_figures_are_drawn_and_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _draw("rapo-10", LINES, tmp_path, "GRPO")
    assert (tmp_path / "rapo-10/figures/entropy-and-tokens.svg").is_file()
    assert "RAPO, figure 10" in capsys.readouterr().out
    assert draw("rapo-4", LINES, tmp_path, None).left_out == (
        "no diversity: no run has recorded diversity.",
    )
    with raises_code("unknown-figure"):
        _draw("rapo-33", LINES, tmp_path, None)
    with raises_code("no-run-finished"):
        _draw("rapo-3", [], tmp_path, None)
    assert {"rapo-3", "rapo-4", "rapo-10", "rapo-11", "arpo-7", "arpo-8"} <= {*PAPERS}


class Corners:
    """Each word a direction of its own."""

    def encode(self, texts: list[str]) -> np.ndarray:
        words = sorted({word for text in texts for word in text.split()})
        rows = np.array([[float(word in text.split()) for word in words] for text in texts])
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def said(tree: Tree, *answers: str) -> Tree:
    contents = dict(zip((leaf.step_id for leaf in tree.leaves), answers, strict=True))
    steps = [
        replace(one, content=StepContent(answer=contents[one.id])) if one.id in contents else one
        for one in tree.steps
    ]
    return replace(tree, steps=tuple(steps))


def test_the_distance_between_rollouts_by_hand() -> None:
    tree = build_tree(Part.of("p", Part("s"), Part("s"), Part("s")))
    # Cosines: a and b 0, a and "a b" √½, b and "a b" √½.
    found = distance(said(tree, "a", "b", "a b"), Corners())
    assert found == pytest.approx(1 - 2 * 0.5**0.5 / 3)
    assert distance(said(tree, "a", "a", "a"), Corners()) == pytest.approx(0.0)
    alone = build_tree(Part.of("p", Part("s")))
    assert distance(said(alone, "a"), Corners()) is None


def test_a_portable_study_has_fingerprints_of_its_own(tmp_path: Path) -> None:
    plain = make_plan(written(tmp_path, SMALL)).runs
    portable = make_plan(written(tmp_path, f"portable = true\n{SMALL}")).runs
    # Also one that only leaves out the kernels.
    without = "settings.learn.compile_kernels = false\n"
    without += "settings.engine.native.compile_kernels = false\n"
    alike = make_plan(written(tmp_path, f"{without}{SMALL}")).runs
    for one in (plain, alike):
        assert not {run.fingerprint for run in one} & {run.fingerprint for run in portable}
        assert one[0].warmup is not None and portable[0].warmup is not None
        assert one[0].warmup.fingerprint != portable[0].warmup.fingerprint
    config = portable[0].config
    assert not config.learn.compile_kernels and not config.engine.native.compile_kernels


STEPS = """
import hashlib, numpy as np, torch
torch.set_num_threads(1)
draws = np.random.default_rng(0)
first, second, x = (torch.from_numpy(draws.standard_normal(s, np.float32))
                    for s in ((96, 64), (64, 96), (48, 96)))
weights = [first.requires_grad_(), second.requires_grad_()]
optimiser = torch.optim.AdamW(weights, lr=1e-2)
for _ in range(5):
    hidden = torch.nn.functional.silu(torch.softmax(x @ first, -1))
    loss = torch.nn.functional.cross_entropy(hidden @ second, torch.arange(48))
    optimiser.zero_grad(); loss.backward(); optimiser.step()
whole = torch.cat([one.detach().flatten() for one in weights])
print(hashlib.blake2b(whole.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_portable_step_is_the_same_without_the_newer_instructions() -> None:
    """What another processor lacks is switched off in glibc and MKL."""
    older = {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX,-FMA4,-BMI2",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", STEPS],
            env={**os.environ, **PORTABLE, **more},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for more in ({}, older)
    ]
    assert found[0] == found[1] and found[0].strip()
