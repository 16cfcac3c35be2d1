"""The examples run, and print what their pages promise."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PRINTED = {
    "own_tool": "-> ValueError: unknown is not in the question']",
    "own_tasks": "accuracy 1.00",
    "own_environment": "0.0.0.0: ['taken', 'open'], reward 1.0\n0.0.1: ['taken'], reward 0.0",
    "own_explorer": "0.0.1 BranchCause e12 r5",
    "own_credit": "0.0      -0.17  ['e12']",
    "own_reward": "{'exact_match': 1.0, 'thrift': -2.0} -> 0.8, advantage +0.47",
}
"""A line of each. The advantage: rewards 0, 0.9, 0.8 have mean 17/30 and sample deviation 0.4933;
(0.8 - 0.5667) / 0.4933."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its threads back: an example may set how many."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_example_is_tested() -> None:
    # The diversity of a run that is there already has a file of tests of its own.
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "diversity"}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", PRINTED)
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(path), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out
