"""Damaged run folders, evaluations and data files: every command ends with what it was asked for or
with one paragraph - without a traceback, in time, and with nothing half made."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.tiny import tiny

from treegraft.cli import main as cli
from treegraft.policy.learn.learner import Learner
from treegraft.train import train

LONGEST_S = 10.0
"""Of one command, in processor seconds, so that a busy machine fails nothing."""
SHAPES: Mapping[str, Any] = tiny(
    run={"name": "a", "num_updates": 2, "tasks_per_update": 2},
    tasks={"num_train": 4, "num_eval": 2},
    warmup={"num_steps": 4},
    explore={"explorers": ["graft"], "graft": {"num_hybrid": 2}},
    buffer={"path": "expert", "encoder": "hashing", "grow": {"num_best": 1, "min_reward": -2.0}},
    eval={"num_samples": 1},
)
ROWS = [
    {"question": f"r1 of e{n} ?", "answer": "e3", "kind": "a", "meta": {"n": n}} for n in range(6)
]
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\ud800",
    "\x1b[2J\u202e",
    [],
    {},
    [[[[]]]],
    {"a": {"b": None}},
)
WHOLES = (
    b"",
    b"\xff\xfe{}",
    b"\0" * 64,
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"{}\n" * 3,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b'{"update": ' + b"9" * 5000 + b"}\n",
)


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


def make_material(folder: Path) -> None:
    """A run that was stopped before its last update, two evaluations of it, and data."""
    original = Learner.learn
    count = 0

    def stopping(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    with _threads_kept(), mock.patch.object(Learner, "learn", stopping):
        with contextlib.suppress(KeyboardInterrupt):
            train({**SHAPES, "run": {**SHAPES["run"], "dir": str(folder)}})
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (folder / "rows.json").write_text(json.dumps(ROWS))
        _write_parquet(folder / "rows.parquet")
        for name in ("first", "second"):
            suite = f"gsm8k={folder / 'rows.jsonl'}"
            where = ["--into", str(folder / name)]
            code, printed = command("eval", "suite", str(folder / "a"), suite, *where)
            assert code == 0, printed


def _write_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def command(*arguments: str) -> tuple[int, str]:
    """Returns the exit code of a command line and all that it printed."""
    out = io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["treegraft", *arguments]),
        mock.patch.object(cli, "_silence_others", lambda: None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(bool(error.code))
        except Exception:
            code = 70
            out.write(traceback.format_exc())
    return code, out.getvalue()


# ---------------------------------------------------------------------- damage

RUN_FILES = (
    "a/config.json",
    "a/metrics.jsonl",
    "a/buffer/traces.sqlite",
    "a/trees/update-000001.jsonl.zst",
    "a/trees/eval-000000-greedy.jsonl.zst",
    "a/checkpoints/update-000001/treegraft/state.json",
    "a/checkpoints/update-000001/treegraft/config.json",
    "a/checkpoints/update-000001/treegraft/optimiser.safetensors",
    "a/checkpoints/update-000001/config.json",
    "a/checkpoints/update-000001/model.safetensors",
    "a/checkpoints/update-000001/tokenizer.json",
)
EVAL_FILES = ("first/eval.json", "first/trees/gsm8k.jsonl", "first/report.json")
DATA_FILES = ("rows.jsonl", "rows.json", "rows.parquet")


def commands_for(name: str, folder: Path) -> list[list[str]]:
    """Returns the commands that read a file."""
    run = str(folder / "a")
    if name in DATA_FILES:
        # The world's tool answers no questions of a file.
        rows = f'tasks.dataset.eval=["{folder / name}"]'
        return [["eval", run, "tasks.kind=dataset", rows, "rollout.max_tool_calls=0"]]
    if name in EVAL_FILES:
        again = ["eval", "suite", run, f"gsm8k={folder / 'rows.jsonl'}", "--into"]
        both = [str(folder / "first"), str(folder / "second")]
        return [["compare", *both], [*again, both[0]]]
    if name.endswith("config.json") and "treegraft" not in name and "checkpoints" in name:
        return [["eval", run]]
    reading = [["view", run, "--text", "newest"], ["compare", run, run]]
    reading.append(["report", run, "--out", f"{run}-r"])
    reading = reading if "checkpoints" not in name else [["eval", run]]
    return [*reading, ["train", "--resume", run]]


@st.composite
def damages(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[str, Any]:
    """Draws a file and what becomes of it."""
    name = draw(st.sampled_from(names))
    kinds = ["cut", "flip", "whole", "gone", "folder", "loop"]
    if name.endswith((".json", ".jsonl")):
        kinds += ["value"] * 5
    kind = draw(st.sampled_from(kinds))
    if kind == "whole":
        return name, (kind, draw(st.sampled_from(WHOLES)))
    places = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
    return name, (kind, places, draw(st.sampled_from(VALUES)))


def damage(path: Path, what: Any) -> None:
    """Does it."""
    kind = what[0]
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[: what[1][0] % max(1, len(data))])
    elif kind == "flip":
        changed = bytearray(data)
        for place in what[1]:
            changed[place % len(data)] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
    elif kind == "whole":
        path.write_bytes(what[1])
    elif kind == "value":
        path.write_text(_with_value(data.decode(), *what[1:]), encoding="utf-8")
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)


def _with_value(text: str, places: list[int], value: Any) -> str:
    """One value somewhere in the JSON of a file, or of one of its lines, replaced."""
    lines = text.splitlines() if "\n{" in text or text.count("\n") == 1 else [text]
    number = places[0] % len(lines)
    data = json.loads(lines[number])
    place = data
    steps = places[1:] or [0]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if not isinstance(place, dict | list) or not place:
            break
        key = sorted(place)[step % len(place)] if isinstance(place, dict) else step % len(place)
        if following is None or not isinstance(place[key], dict | list) or not place[key]:
            place[key] = value
            break
        place = place[key]
    lines[number] = json.dumps(data)
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def check(material: Path, damaged: tuple[str, Any]) -> None:
    """Damages a copy and lets each command meet it."""
    name, what = damaged
    with tempfile.TemporaryDirectory() as place, _threads_kept():
        for number in range(len(commands_for(name, Path(place)))):
            folder = Path(place) / str(number)
            shutil.copytree(material, folder)
            _move(material, folder)
            damage(folder / name, what)
            arguments = commands_for(name, folder)[number]
            began = time.process_time()
            code, printed = command(*arguments)
            spent = time.process_time() - began
            shown = (name, what, arguments, code, printed[-3000:])
            assert "Traceback" not in printed and code in (0, 1, 2, 3), shown
            assert spent < LONGEST_S, (spent, *shown)
            if code:
                assert sum(line.startswith("error: ") for line in printed.splitlines()) == 1, shown
            left = [
                one.name for one in folder.rglob(".*.partial*") if not one.name.endswith("-wal")
            ]
            assert not left, (left, *shown)
            if code in (2, 3) and arguments[0] == "train":
                # Refused: what the run has done is still there.
                assert os.path.lexists(folder / "a" / "checkpoints" / "update-000001"), shown


def _move(material: Path, folder: Path) -> None:
    """The evaluations name the file of their set."""
    for path in folder.glob("*/eval.json"):
        path.write_text(path.read_text().replace(str(material), str(folder)))


def test_undamaged_files_are_read_and_trained_on(material: Path) -> None:
    """What is refused undamaged would be refused damaged, whatever the damage."""
    with tempfile.TemporaryDirectory() as place, _threads_kept():
        for number, name in enumerate(
            ("rows.json", "rows.jsonl", "rows.parquet", "a/metrics.jsonl")
        ):
            folder = Path(place) / str(number)
            shutil.copytree(material, folder)
            for arguments in commands_for(name, folder):
                code, printed = command(*arguments)
                assert code == 0, (arguments, printed[-1500:])


QUIET: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}
ALL = (*RUN_FILES, *EVAL_FILES, *DATA_FILES)


@given(damaged=damages(ALL))
@settings(max_examples=12, derandomize=True, **QUIET)
@pytest.mark.smoke
def test_damage_is_told(material: Path, damaged: tuple[str, Any]) -> None:
    check(material, damaged)


@pytest.mark.slow
@given(damaged=damages(ALL))
@settings(max_examples=500, **QUIET)
def test_much_damage_is_told(material: Path, damaged: tuple[str, Any]) -> None:
    check(material, damaged)
