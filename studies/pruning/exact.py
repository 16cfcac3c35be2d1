"""How many of a study's trajectories are those of a perfect expert, as stored and once pruned.

    python -m studies.pruning.exact runs/methods-xeon/buffers --world imperfect

The folder is that of the buffers that a study of the search world has made. A trajectory is exact
if it makes the question's calls in their order, none besides, and answers with the last result.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from treegraft.core.types import StepContent, Trace
from treegraft.traces.buffer import TraceBuffer

Name = tuple[str | None, str]


class Look(NamedTuple):
    """What a trajectory does with its question."""

    is_exact: bool
    is_whole: bool
    """Whether all the calls that the question takes are there."""


def look(steps: Sequence[Trace]) -> Look:
    """Returns it for "r1 of r0 of e3 ?", by following the results that the trajectory holds."""
    *relations, entity = (word for word in steps[0].key.splitlines()[0].split() if word[0] in "re")
    written = [step.value for step in steps if isinstance(step.value, StepContent)]
    made = [
        (call.body, observation.text.split()[-1])
        for step in written
        for call, observation in zip(step.calls, step.observations, strict=True)
    ]
    results = dict(made)
    needed = []
    for relation in reversed(relations):
        needed.append(f"{entity} {relation}")
        if needed[-1] not in results:
            return Look(False, False)
        entity = results[needed[-1]]
    is_exact = [body for body, _ in made] == needed and written[-1].answer == entity
    return Look(is_exact, True)


def looks(path: Path) -> dict[Name, Look]:
    """Returns what each trajectory of a buffer does, by its task and name."""
    with TraceBuffer.open_as_built(path) as buffer:
        return {
            (steps[0].task_id, steps[0].trajectory or ""): look(steps)
            for steps in buffer.trajectories()
        }


def row(raw: Path, pruned: Path) -> tuple[int, int, int, int]:
    """Returns how many trajectories there are, how many are exact as stored, and once pruned, and
    from how many pruning has removed a call that the question takes."""
    before = looks(raw)
    after = looks(pruned)
    lost = sum(before[name].is_whole and not one.is_whole for name, one in after.items())
    stored, exact = (sum(one.is_exact for one in found.values()) for found in (before, after))
    return len(after), stored, exact, lost


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", default="imperfect")
    given = parser.parse_args()
    rows = []
    print("| pair | trajectories | exact as stored | exact once pruned | a needed call removed |")
    print("|---|---:|---:|---:|---:|")
    for pruned in sorted(given.folder.glob(f"pruned-{given.world}-*.sqlite")):
        pair = pruned.stem.split("-")[-2]
        (raw,) = given.folder.glob(f"raw-{given.world}-{pair}-*.sqlite")
        rows.append(row(raw, pruned))
        print(f"| {pair} | {' | '.join(map(str, rows[-1]))} |", flush=True)
    num, stored, exact, lost = map(sum, zip(*rows, strict=True))
    print(f"| all | {num} | {stored / num:.1%} | {exact / num:.1%} | {lost / num:.2%} |")


if __name__ == "__main__":
    main()
