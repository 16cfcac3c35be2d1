"""Entropy by position: which steps count, means and intervals by hand, what is said where there is
nothing to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extras.test_report import made_run, table
from tests.support.viewed import grown_tree, step

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'treegraft[reports]'"
)

from treegraft.core.types import (
    BranchCause,
    ContinuationCause,
    EntropyKind,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Tree,
)
from treegraft.extras.lab.report.bands import student
from treegraft.extras.lab.report.command import write_report
from treegraft.extras.lab.report.positions import (
    BY_RESULTS,
    BY_TOOL,
    MOST_POSITIONS,
    PROMPT,
    Moments,
    PositionMeans,
    live_steps,
)

NAME = "entropy-by-position"
ANSWER = StepContent(answer="z")


def called(*tools: str) -> StepContent:
    """Returns a step of calls of these tools with their results."""
    return StepContent(
        calls=tuple(ToolCall(tool, "x") for tool in tools),
        observations=tuple(Observation(text="y") for _ in tools),
    )


def tree_of(*steps: Step, update: int = 1, task: str = "t/1") -> Tree:
    """Returns a tree of these steps below a prompt of two tokens."""
    all_steps = (step("0", "pp", StepContent(thought="?"), None), *steps)
    parents = {one.parent for one in all_steps}
    leaves = tuple(
        Leaf(step_id=one.id, status=Status.COMPLETED, reward=0.0)
        for one in all_steps
        if one.id not in parents
    )
    return Tree(
        task=Task(id=task, question="?", reference=()),
        group_id=f"{update}/{task}",
        steps=all_steps,
        leaves=leaves,
    )


def sampled(step_id: str, entropies: tuple[float, ...], content: StepContent = ANSWER) -> Step:
    """Returns a step of sampled tokens with these entropies, and one token of results if any."""
    num_results = int(bool(content.observations))
    cause = StartCause() if step_id.count(".") == 1 else ContinuationCause()
    made = step(step_id, "s" * len(entropies) + "t" * num_results, content, cause)
    return replace(made, entropies=(*entropies, *(0.0,) * num_results))


# One search, then Python; and an answer at once.
LONG = tree_of(
    sampled("0.0", (0.2, 0.6), called("search")),
    sampled("0.0.0", (1.0, 0.5), called("python", "python")),
    sampled("0.0.0.0", (2.0,)),
    sampled("0.1", (0.4,)),
)
SHORT = tree_of(sampled("0.0", (0.9,)), task="t/2")


def test_which_steps_count_and_what_they_follow() -> None:
    # Of the tree with a graft and a branch: not the graft, nor the answer below it, nor the branch.
    found = [(one.id, after, count) for one, after, count in live_steps(grown_tree(1, "t/1"))]
    assert found == [
        ("0.0", PROMPT, 0),
        ("0.1", PROMPT, 0),
        ("0.1.0", "search", 1),
        ("0.1.0.0", "search", 2),
        ("0.2", PROMPT, 0),
    ]
    assert [(one.id, after, count) for one, after, count in live_steps(LONG)] == [
        ("0.0", PROMPT, 0),
        ("0.0.0", "search", 1),
        ("0.0.0.0", "python", 2),
        ("0.1", PROMPT, 0),
    ]
    both = tree_of(sampled("0.0", (0.1,), called("search", "python")), sampled("0.0.0", (0.1,)))
    assert [after for _, after, _ in live_steps(both)] == [PROMPT, "search + python"]


def test_nothing_below_a_branch_or_a_forced_opening_counts() -> None:
    branch = BranchCause(entropy_change=1.0, probability=1.0, rule="threshold")
    first, below = sampled("0.0", (0.1, 0.1), called("search")), sampled("0.0.0", (0.1,))
    branched = tree_of(replace(first, cause=branch), below)
    assert list(live_steps(branched)) == []
    forced = replace(
        first,
        origins=(Origin.FORCED, *first.origins[1:]),
        loss_mask=(False, *first.loss_mask[1:]),
    )
    assert list(live_steps(tree_of(forced, below))) == []


def test_means_and_intervals_over_trees_by_hand() -> None:
    means = PositionMeans()
    means.add(1, LONG)
    means.add(1, SHORT)
    assert (means.num_sampled, means.num_live, means.is_measured, means.is_bound) == (
        *(5, 5),
        *(True, False),
    )
    first, second = means.points((BY_TOOL, PROMPT))
    # Trees give n = 2, 1 steps with S = 0.6, 0.9: m = 1.5 / 3. S - m n = -0.4, 0.4, so the error is
    # sqrt(2 / 1 * 0.32) / 3 = 0.8 / 3, and t(1, 0.975) = 12.7062.
    assert (first.mean, first.num) == (pytest.approx(0.5), 2)
    assert (first.low, first.high) == (
        pytest.approx(0.5 - 12.7062 * 0.8 / 3, abs=1e-4),
        pytest.approx(0.5 + 12.7062 * 0.8 / 3, abs=1e-4),
    )
    # One step alone has a second token: no interval from one tree.
    assert (second.x, second.mean, second.low, second.high) == (2, 0.6, None, None)
    assert [(p.x, p.mean) for p in means.points((BY_TOOL, "search"))] == [(1, 1.0), (2, 0.5)]
    assert [(p.x, p.mean) for p in means.points((BY_TOOL, "python"))] == [(1, 2.0)]
    assert means.points((BY_RESULTS, "1")) == means.points((BY_TOOL, "search"))
    assert means.points((BY_RESULTS, "3")) == []


@given(st.lists(st.floats(0, 8), min_size=1, max_size=20))
def test_with_one_step_a_tree_the_interval_is_students(values: list[float]) -> None:
    moments = Moments()
    for value in values:
        moments.add([value])
    found = moments.point(1)
    expected = student(values)
    assert (found.low is None) is (expected[1] is None)
    for own, theirs in zip((found.mean, found.low, found.high), expected, strict=True):
        # Sums of squares lose half of the digits where all values are alike.
        assert own is None or own == pytest.approx(theirs, abs=1e-5)


def test_long_steps_are_cut() -> None:
    means = PositionMeans()
    means.add(1, tree_of(sampled("0.0", (0.5,) * (MOST_POSITIONS + 3))))
    assert len(means.points((BY_TOOL, PROMPT))) == MOST_POSITIONS


def test_the_figure_of_runs_with_other_seeds(tmp_path: Path) -> None:
    lines = [{"update": 1, "reward/mean": 0.0}]
    for seed, trees in enumerate(([LONG, SHORT], [SHORT])):
        made_run(tmp_path / f"a-seed{seed}", {"run": {"seed": seed}}, lines, {1: trees})
    paths = [str(tmp_path / f"a-seed{seed}") for seed in range(2)]
    written = write_report(paths, out=tmp_path / "out", only=[NAME])
    assert written.figures == (NAME,)
    rows = {
        (row["by"], row["which"], row["position"]): row for row in table(tmp_path / "out", NAME)
    }
    prompt = rows["after", PROMPT, "1"]
    # Means of the runs: 0.5 and 0.9; sd = 0.2828, so 0.7 ± 12.7062 * 0.2.
    assert (prompt["steps"], prompt["trees"], prompt["runs"]) == ("4", "3", "2")
    assert [float(prompt[name]) for name in ("mean", "low", "high")] == [
        pytest.approx(value, abs=1e-4) for value in (0.7, 0.7 - 2.54124, 0.7 + 2.54124)
    ]
    # Of the second run no step follows a result, so the first stands alone there.
    assert (rows["results so far", "1", "2"]["runs"], rows["results so far", "1", "2"]["low"]) == (
        *("1",),
        "",
    )
    page = written.page.read_text()
    assert "Counted are 6 of 6 sampled steps" in page


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    lines = [{"update": 1, "reward/mean": 0.0}]
    silent = tree_of(sampled("0.0", (0.0, 0.0)))
    run = made_run(tmp_path / "silent", {}, lines, {1: [silent]})
    (said,) = write_report([str(run)], only=[NAME]).left_out
    assert "silent: its engine recorded no entropies. engine.kind = 'native' records them" in said
    bound = tree_of(replace(sampled("0.0", (0.5,)), entropy_kind=EntropyKind.TOP_K))
    run = made_run(tmp_path / "bound", {}, lines, {1: [bound]})
    notes = write_report([str(run)], only=[NAME]).notes
    assert any("bound: its entropies are over the most likely tokens only" in one for one in notes)
    run = made_run(tmp_path / "bare", {}, lines)
    (said,) = write_report([str(run)], only=[NAME]).left_out
    assert said.endswith("no run folder with recorded trees was given (track.record_trees).")
