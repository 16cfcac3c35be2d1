"""Where a run's Step-Trace Buffer comes from, and what reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks
from treegraft.traces.rollout_buffer import RolloutBuffer, buffer_use

GRAFT = {"explore": {"explorers": ["graft"]}}
OWN = {"explore": {"explorers": ["my_package:Mine"]}}
LESSONS = {"loss": {"lesson_coef": 0.5}, "learn": {"num_lessons": 2}}
IMITATES = {"warmup": {"num_steps": 2, "traces": "buffer"}}
IDLE_WARMUP = {"warmup": {"num_steps": 0, "traces": "buffer"}}

# Path, other settings, then by hand: origin, readers, and whether the run opens or makes it.
CASES: list[tuple[str, dict[str, Any], str, set[str], bool]] = [
    ("", {}, "none", set(), False),
    ("", OWN, "none", set(), False),
    ("expert", {}, "expert", set(), False),
    ("expert", GRAFT, "expert", {"explorer"}, True),
    ("expert", OWN, "expert", {"explorer"}, True),
    ("expert", LESSONS, "expert", {"lessons"}, True),
    ("expert", IMITATES, "expert", {"warmup"}, True),
    ("expert", IDLE_WARMUP, "expert", set(), False),
    ("self", GRAFT, "self", {"explorer"}, True),
    ("self", LESSONS, "self", {"lessons"}, True),
    ("a.sqlite", {}, "file", set(), False),
    ("a.sqlite", GRAFT, "file", {"explorer"}, True),
    ("a.sqlite", LESSONS, "file", {"lessons"}, True),
    # A finished file is read by the warm-up alone, and closed again.
    ("a.sqlite", IMITATES, "file", {"warmup"}, False),
    ("a.jsonl", {}, "import", set(), False),
    ("$ROWS", IMITATES, "import", {"warmup"}, True),
    ("expert.jsonl", GRAFT | LESSONS | IMITATES, "import", {"explorer", "lessons", "warmup"}, True),
    ("./expert", GRAFT, "file", {"explorer"}, True),
]


@pytest.mark.parametrize(("path", "more", "origin", "readers", "is_due"), CASES)
def test_origin_and_readers(
    path: str,
    more: dict[str, Any],
    origin: str,
    readers: set[str],
    is_due: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROWS", "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    config = load_config(tiny(**{"buffer": {"path": path, "encoder": "hashing"}} | more))
    assert buffer_use(config) == (origin, readers)
    source = build_tasks(config.tasks, config.run.seed)
    if is_due and origin in ("file", "import"):
        with raises_code("buffer-missing"):
            RolloutBuffer(config, source, tmp_path / "r")
        return
    found = RolloutBuffer(config, source, tmp_path / "r")
    assert (found.origin, found.readers, found.is_due) == (origin, readers, is_due)
    # What the run makes lies in its folder, also before it is there.
    is_made = origin in ("expert", "self", "import")
    assert found.file == (tmp_path / "r/buffer/traces.sqlite" if is_made else Path(path))
