"""`treegraft profile RUN`: where an update's seconds went, by spans that can be added up on
paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.error_codes import raises_code
from typer.testing import CliRunner

from treegraft.cli.main import app
from treegraft.core.errors import SettingError
from treegraft.extras.lab.profile_spans import (
    Interval,
    common,
    length,
    lengths_within,
    spent,
    table,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=8,
)


def write(folder: Path, role: str, spans: Sequence[tuple[str, float, float]]) -> Path:
    """A file of spans (name, begin, end in seconds)."""

    def moment(seconds: float) -> str:
        return datetime.fromtimestamp(1e9 + seconds, UTC).isoformat().replace("+00:00", "Z")

    path = folder / f"spans-{role.replace(' ', '-')}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for name, begin, end in spans:
            resource = {"attributes": {"treegraft.role": role}}
            span = {"name": name, "start_time": moment(begin), "end_time": moment(end)}
            file.write(json.dumps({**span, "resource": resource}) + "\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two updates of ten seconds with an evaluation between them."""
    write(
        tmp_path,
        "rank 0",
        [
            *(("rollout", 0, 6), ("learn", 6, 9), ("update", 0, 10)),
            *(("rollout", 20, 26), ("learn", 26, 29), ("update", 20, 30)),
            ("evaluation", 11, 19),
        ],
    )
    write(tmp_path, "grower 10", [("engine", 0, 4), ("engine", 2, 5), ("engine", 21, 23)])
    write(tmp_path, "grower 9", [("engine", 12, 18), ("tool search", 25, 32)])
    return tmp_path


def test_seconds_are_those_of_updates_and_overlaps_count_once(run: Path) -> None:
    found = spent(run)
    assert (found.num_updates, found.update_s) == (2, 10.0)
    # 7 of 12 seconds of rollouts had a completion under way; the evaluation's do not count.
    assert found.idle == pytest.approx(1 - 7 / 12)
    parts = {(one.process, one.what): one for one in found.parts}
    engine = parts["grower 10", "engine"]
    assert (engine.times, engine.seconds) == (1.5, 3.5)
    assert engine.share == pytest.approx(0.35) and engine.at_once == pytest.approx(9 / 7)
    # From 25 to 32, of which the update holds 5 seconds.
    assert parts["grower 9", "tool search"].seconds == 2.5
    assert list(parts) == [
        *(("rank 0", "rollout"), ("rank 0", "learn")),
        *(("grower 9", "tool search"), ("grower 10", "engine")),
    ]


def test_the_command_prints_the_table(run: Path, tmp_path: Path) -> None:
    told = ["profile", str(run), "--json", str(tmp_path / "spent.json")]
    out = CliRunner().invoke(app, told, catch_exceptions=False).stdout
    assert out.splitlines()[0] == "2 updates, 10.000 s each on average"
    assert all(line in out.splitlines() for line in table(spent(run).parts))
    assert "| grower 10 | engine | 1.5 | 3.500 | 35% | 1.3 |" in out
    assert "no completion was under way for 42% of the rollouts' time" in out
    assert json.loads((tmp_path / "spent.json").read_text(encoding="utf-8"))["num_updates"] == 2


def test_a_killed_process_leaves_half_a_line(run: Path) -> None:
    whole = spent(run)
    with (run / "spans-grower-9.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"name": "engi')
    assert spent(run) == whole


def test_an_update_that_was_stopped_does_not_count(run: Path) -> None:
    """Seconds 40 to 45 belong to an update that was done again from 50 to 60."""
    whole = spent(run)
    stopped = write(run, "rank 0 once more", [("learn", 40, 45), ("update", 40, 45)])
    lines = [json.loads(line) for line in stopped.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["resource"]["attributes"]["treegraft.role"] = "rank 0"
        line["status"] = {"status_code": "ERROR"}
    stopped.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert spent(run) == whole


def test_updates_that_touch_are_two(tmp_path: Path) -> None:
    write(tmp_path, "rank 0", [("update", 0, 2), ("update", 2, 6)])
    found = spent(tmp_path)
    assert (found.num_updates, found.update_s) == (2, 3.0)


def test_what_cannot_be_read_is_said(run: Path, tmp_path: Path) -> None:
    with (run / "spans-grower-9.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"name": "engine"}\n')
    with raises_code("span-invalid"):
        spent(run)
    (tmp_path / "empty").mkdir()
    with raises_code("no-spans"):
        spent(tmp_path / "empty")
    done = CliRunner().invoke(app, ["profile", str(run), "run.seed=1"])
    assert isinstance(done.exception, SettingError)
    assert f"treegraft profile {run / 'config.json'} run.seed=1" in str(done.exception)
    done = CliRunner().invoke(app, ["profile", str(run), "--updates", "5"])
    assert isinstance(done.exception, SettingError)
    assert "--updates would have no effect with a run folder" in str(done.exception)


@given(some=INTERVALS, others=INTERVALS)
def test_times_are_those_of_seconds_counted_one_by_one(
    some: list[Interval], others: list[Interval]
) -> None:
    def seconds(intervals: list[Interval]) -> set[int]:
        return {one for begin, end in intervals for one in range(int(begin), int(end))}

    both = common(union(some), union(others))
    each = [length(common([one], union(others))) for one in some]
    assert list(lengths_within(some, union(others))) == each
    assert seconds(both) == seconds(some) & seconds(others)
    assert length(union(some)) == len(seconds(some)) and length(both) == len(seconds(both))
