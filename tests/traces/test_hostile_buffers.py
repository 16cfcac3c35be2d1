"""Step-Trace Buffers from elsewhere: paths, names, numbers and names of code in them do nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.policy.test_imitation import TASKS, traces
from tests.support.error_codes import raises_code
from typer.testing import CliRunner

from treegraft.cli.main import app
from treegraft.core.errors import TreegraftError
from treegraft.settings.policy import WarmupSettings
from treegraft.tools.search.encoders import HashingEncoder
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.demonstrations import read_demonstrations

HUGE = 2**63 - 1
CALL = {"name": "os:system", "body": "touch marker"}
STATEMENTS = {
    "code as encoder": "UPDATE meta SET value = 'acts:Encoder' WHERE name = 'encoder'",
    "a module's file as encoder": "UPDATE meta SET value = './acts.py' WHERE name = 'encoder'",
    "a path as package": "UPDATE meta SET value = 'pypi:../acts' WHERE name = 'encoder'",
    "a folder as encoder": "UPDATE meta SET value = './folder' WHERE name = 'encoder'",
    "huge vectors": f"UPDATE meta SET value = {HUGE} WHERE name = 'dim'",
    "large vectors": f"UPDATE meta SET value = {2**40} WHERE name = 'dim'",
    "vectors below nothing": "UPDATE meta SET value = -1 WHERE name = 'dim'",
    "a huge id": f"UPDATE traces SET id = {HUGE} WHERE id = 1",
    "a huge position": f"UPDATE members SET position = {HUGE}",
    "positions below 0": "UPDATE members SET position = position - 5",
    "an endless reward": "UPDATE traces SET reward = 9e999",
    "a reward in words": "UPDATE members SET reward = 'acts:reward'",
    "a huge update": f"UPDATE traces SET added_at = {HUGE}, policy_version = {HUGE}",
    "paths as names": "UPDATE traces SET source = '../../up', trajectory = '/etc/passwd'",
    "a terminal's codes": "UPDATE members SET source = char(27) || '[2J', task_id = char(27)",
    "codes in traces": "UPDATE traces SET source = char(27) || '[2J', key = '\"\\u001b[2J\"'",
    "codes as encoder": "UPDATE meta SET value = char(27) || '[2J' WHERE name = 'encoder'",
    "a deep text": f"UPDATE traces SET value = '{'[' * 100_000}'",
    "calls of code": f"UPDATE traces SET value = '{json.dumps({'calls': [CALL]})}'",
    "bytes for text": "UPDATE traces SET key = zeroblob(100)",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user who has been sent a buffer, and code beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acts.py").write_text("import pathlib; pathlib.Path('marker').touch()")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "modules.json").write_text('[{"type": "acts.Encoder", "path": ""}]')
    with TraceBuffer(tmp_path / "b.sqlite", HashingEncoder()) as buffer:
        for task in TASKS[:3]:
            buffer.add(traces(task, "a"))
    return tmp_path


def imitated(place: Path) -> None:
    read_demonstrations(place / "b.sqlite", WarmupSettings(), TASKS)


def searched(place: Path) -> None:
    with TraceBuffer(place / "b.sqlite", "hashing") as buffer:
        found = [trace for trace, _ in buffer.search(["e1 r1"], k=9, allow_terminal=True)[0]]
        assert [len(buffer.rest(one)) for one in found]
        list(buffer.trajectories())


def typed(command: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        words = ["buffer", *command.split()]
        result = CliRunner().invoke(app, words, color=True, env={"COLUMNS": "200"})
        assert "\x1b[2J" not in result.output
        if result.exception is not None:
            raise result.exception

    return run


USES = {
    "imitated": imitated,
    "searched": searched,
    "stats": typed("stats b.sqlite"),
    "show": typed("show b.sqlite"),
    "search": typed("search b.sqlite e1"),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_hostile_buffer_does_nothing(place: Path, name: str) -> None:
    """Each use of it ends as usual, or in an error of ours."""
    with sqlite3.connect(place / "b.sqlite") as connection:
        connection.execute(STATEMENTS[name])
    connection.close()
    before = sorted(one.name for one in place.rglob("*"))
    for use in USES.values():
        try:
            use(place)
        except (TreegraftError, SystemExit):
            continue
    ours = ("b.sqlite-wal", "b.sqlite-shm")
    assert sorted(one.name for one in place.rglob("*") if one.name not in ours) == before
    assert not (place.parent / "up").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE x (a, b AS(a + 1))",
        "CREATE TABLE x (a, b\tGENERATED ALWAYS AS\n(a + 1) STORED)",
        "CREATE TABLE x (a, b as/**/(a + 1))",
        "CREATE VIRTUAL TABLE x USING fts5(a)",
        "create/**/virtual table x using fts5(a)",
        "CREATE VIEW x AS SELECT 1",
        "CREATE TRIGGER x AFTER INSERT ON traces BEGIN DELETE FROM traces; END",
    ],
)
def test_what_runs_when_it_is_read_is_refused_however_it_is_written(place: Path, sql: str) -> None:
    with sqlite3.connect(place / "b.sqlite") as connection:
        connection.execute(sql.replace("create/**/", "CREATE "))
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'x'", (sql,))
    connection.close()
    for use in (imitated, searched):
        with raises_code("buffer-schema-foreign"):
            use(place)
