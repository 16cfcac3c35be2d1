"""The table of README's results, from the recorded lines of four studies.

python -m benchmarks.readme
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import CALLS, known_runs
from treegraft.extras.lab.study.statistics import accuracy_at

STUDIES = Path(__file__).resolve().parents[1] / "studies"
BUDGET = 4000


class World(NamedTuple):
    """A column: a world of a study."""

    study: str
    name: str
    budget: float | None = BUDGET
    """Executed calls at which arms are read; None for the end."""
    without: frozenset[str] = frozenset()
    """Arms that are left out: their runs there spent other calls than those compared."""


WORLDS = {
    "a thought decides": World("bonus-attack.toml", "done"),
    "a token decides": World("thoughts-tuned.toml", "no thoughts"),
    "unsure": World("budgets.toml", "unsure"),
    "short questions": World("budgets.toml", "short"),
    "a flawed expert": World(
        "decisive.toml", "imperfect", None, frozenset({"ARPO", "Tree-GRPO", "commit"})
    ),
}


class Row(NamedTuple):
    """One method, and the name of its arm in the studies."""

    title: str
    arm: str


ROWS = (
    Row("GRPO", "GRPO"),
    Row("[ARPO](docs/arpo.md)", "ARPO"),
    Row("Tree-GRPO", "Tree-GRPO"),
    Row("[RAPO](docs/rapo.md)", "RAPO"),
    Row("imitation of the expert as it is", "SFT, raw"),
    Row("imitation of the [pruned](docs/buffer.md#pruning) expert", "SFT, pruned"),
    Row("own lessons, Tree-GRPO", "own lessons, Tree-GRPO"),
    Row("own lessons, a bonus for calls", "own lessons, call bonus"),
    Row("[commit branching](docs/methods.md#commit-branching), ours", "commit, begun anew"),
)


def measured(world: World) -> dict[str, str]:
    """Returns the cell of each arm: its mean accuracy at the budget, or at its end with its mean
    calls if a run ended before."""
    path = STUDIES / world.study
    known = read_study(path).arms.keys() - world.without
    arms = [row.arm for row in ROWS if row.arm in known]
    plan = make_plan(path, only=[world.name, *arms])
    results = STUDIES / (plan.study.results or f"{path.stem}.jsonl")
    lines = known_runs(results, plan.runs)[0]
    found = {}
    for arm in arms:
        curves = [line["curve"] for (_, one, _), line in lines.items() if one == arm]
        if not curves:
            continue
        end = statistics.fmean(curve[-1]["accuracy"] for curve in curves)
        found[arm] = f"{end:.2f}"
        if world.budget is None:
            continue
        at = [
            accuracy_at(
                [one[CALLS] for one in curve], [one["accuracy"] for one in curve], world.budget
            )
            for curve in curves
        ]
        if None in at:
            calls = statistics.fmean(curve[-1][CALLS] for curve in curves)
            found[arm] += f" at {calls:,.0f}"
        else:
            found[arm] = f"{statistics.fmean(one for one in at if one is not None):.2f}"
    return found


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    worlds = [measured(world) for world in WORLDS.values()]
    yield f"| method | {' | '.join(WORLDS)} |"
    yield "|---" * (1 + len(WORLDS)) + "|"
    for row in ROWS:
        cells = [one.get(row.arm, "") for one in worlds]
        yield f"| {row.title} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
