"""Several ranks learn what one learns (law 13): real processes, gloo, tiny models."""

from __future__ import annotations

import functools
import json
import tempfile
from typing import Any

import pytest
from tests.distributed.jobs import ranks_of

NAMES = {
    2: (
        "llama",
        "tied",
        "minibatches",
        "kl",
        "contexts",
        "halved",
        "lora",
        "lessons",
        "stored",
        "idle",
        "twice",
        "skipped",
        "resumed",
    ),
    3: ("idle",),
}
"""The checks of `tests.distributed.laws` by number of ranks, all of a number in one job."""
SLOW = (
    "llama",
    "tied",
    "lora",
    "lessons",
    "minibatches",
    "twice",
    "resumed",
    "qwen3",
    "checkpointing",
)
"""Those of three ranks that take too long for the default suite, in a job of their own."""
LIMITS = {"lora": 1e-4}
"""Adam magnifies the rounding of first gradients near 0."""


@functools.cache
def results(num_ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        codes, said = ranks_of(num_ranks, "tests.distributed.laws", folder, *names)
    assert codes == [0] * num_ranks, "".join(said)[-4000:]
    lines = [json.loads(one) for one in said[0].splitlines() if one.startswith('{"check"')]
    return {line["check"]: line for line in lines}


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(ranks, name) for ranks, names in NAMES.items() for name in names]
)
def test_several_ranks_equal_one(num_ranks: int, name: str) -> None:
    assert_equal(name, results(num_ranks, NAMES[num_ranks])[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_three_ranks_equal_one(name: str) -> None:
    assert_equal(name, results(3, SLOW)[name])


def assert_equal(name: str, found: dict[str, Any]) -> None:
    if name == "twice":
        assert found["equal"]
    elif name == "skipped":
        assert found["metrics"] == [1.0, 0.0] and found["still"]
        assert found["finite"] and found["moved"]
    elif name == "halved":
        assert found["types"] == ["torch.bfloat16"] and found["fingerprint"]
    elif name == "resumed":
        # Bit for bit at the same number of ranks.
        assert found["same"] and found["loads"]
        assert max(found["apart"], found["from_one"]) < 1e-5
    else:
        assert found["apart"] < LIMITS.get(name, 1e-5)
        # Rounding of sums and of log-probabilities of weights that differ by rounding.
        assert found["metrics"] < 1e-5 and found["records"] < 1e-4
        assert found["fingerprint"]
        # One rank has all packs, and the other gradients are zeros.
        assert found["equal"] or name != "idle"
