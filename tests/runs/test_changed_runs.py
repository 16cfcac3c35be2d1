"""Nothing that a resume depends on changes unseen: each change is refused in one paragraph that
says what differs and how to go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import differing, tiny
from tests.test_grafted_runs import BOTH

import treegraft
from treegraft.core.errors import CheckpointError, TreegraftError
from treegraft.core.files import file_checksum
from treegraft.core.interrupt import Ended
from treegraft.core.types import Trace
from treegraft.policy.learn.learner import Learner
from treegraft.runs.checkpoint import (
    in_order,
    prune_checkpoints,
    read_state,
    state_json,
    tidy,
)
from treegraft.runs.display import PlainDisplay
from treegraft.runs.record import read_metrics
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.rollout_buffer import OWN_FILE
from treegraft.train import train

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings(folder: Path, **tables: Any) -> dict[str, Any]:
    own = {"name": "a", "dir": str(folder), "num_updates": 3}
    return tiny(**{**BOTH, "run": own, "warmup": {**BOTH["warmup"], "num_steps": 24}, **tables})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with grafts, a growing buffer and a KL reference, from its beginning to its end."""
    return train(settings(tmp_path_factory.mktemp("whole"), loss={"kl_coef": 0.01})).run_dir


@pytest.fixture(scope="module")
def stopped(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stopped in its second update."""
    folder = tmp_path_factory.mktemp("stopped")
    original = Learner.learn
    count = 0

    def asked(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Ended):
        patch.setattr(Learner, "learn", asked)
        train(settings(folder, loss={"kl_coef": 0.01}))
    assert sorted((folder / "a" / "checkpoints").glob("update-*"))[-1].name == "update-000002"
    return folder / "a"


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "a"))


def of_sqlite(statement: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with sqlite3.connect(run / OWN_FILE) as connection:
            connection.execute(statement)
        connection.close()

    return change


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(run: Path) -> None:
        data = json.loads((run / name).read_text())
        change(data)
        (run / name).write_text(json.dumps(data))

    return changed


def other_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/accuracy": 0', '"eval/accuracy": 1', 1))


STATE = "checkpoints/update-000002/treegraft/state.json"
CHANGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    # what is done; what is said; whether --accept-changes goes on
    "settings": (
        edit("config.json", lambda data: data["run"].update(seed=9)),
        "config.json was changed by hand: run.seed was 3, now 9",
        False,
    ),
    "no buffer": (
        lambda run: shutil.rmtree(run / "buffer"),
        "(traces or vectors) is missing since",
        True,
    ),
    "vectors": (
        of_sqlite("UPDATE vectors SET vector = zeroblob(length(vector)) WHERE id = 3"),
        "(traces or vectors) has changed since update-000002",
        True,
    ),
    "a reward": (
        of_sqlite("UPDATE members SET reward = 0.5 WHERE source = 'expert'"),
        "(traces or vectors) has changed since update-000002",
        True,
    ),
    "metrics": (other_metrics, "metrics.jsonl has changed", True),
    "metrics cut": (
        lambda run: (run / "metrics.jsonl").write_text(""),
        "metrics.jsonl has 0 bytes",
        False,
    ),
    "reference": (
        lambda run: (run / "reference" / "reference.safetensors").unlink(),
        "reference/reference.safetensors is missing",
        False,
    ),
}


def test_the_unchanged_copy_goes_on_as_if_nothing_had_happened(whole: Path, copy: Path) -> None:
    train(None, resume=copy)
    assert differing(whole, copy) == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_and_may_be_accepted(
    change: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    do, text, can_accept = CHANGES[change]
    do(copy)
    if change == "settings":
        treegraft.trust(copy)  # else that is asked about first
    before = {file: file.stat().st_size for file in copy.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError) as refused:
        train(None, resume=copy)
    message = str(refused.value)
    assert text in message and "\n" not in message and str(copy) in message, message
    after = {file: file.stat().st_size for file in copy.rglob("*") if file.is_file()}
    aside = ("-wal", "-shm")
    assert {one: size for one, size in after.items() if not one.name.endswith(aside)} == before
    if not can_accept:
        with pytest.raises(TreegraftError):
            train(None, resume=copy, accepts_changes=True)
        return
    assert "--accept-changes" in message
    train(None, resume=copy, accepts_changes=True, display=PlainDisplay(sys.stdout))
    assert len(read_metrics(copy)) == 4
    if "buffer" not in change and change not in ("vectors", "a reward"):
        assert f"warning: {text}" in capsys.readouterr().out


def lose_bytes(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (
            edit(STATE.replace("2", "3"), lambda data: data.update(update=-4)),
            "state.json is different",
        ),
        (lose_bytes, "update-000003 saw"),
    ],
)
def test_the_earlier_checkpoint_is_a_way_out(
    damage: Callable[[Path], None], lost: str, whole: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "a"))
    damage(copy)
    told = f"the run goes on from update-000002 with: treegraft train --resume {copy}"
    for accepts in (False, True):
        with pytest.raises(CheckpointError, match=re.escape(told)) as refused:
            train(None, resume=copy, accepts_changes=accepts)
        assert lost in str(refused.value)
    shutil.rmtree(copy / "checkpoints" / "update-000003")
    train(None, resume=copy)
    assert differing(whole, copy) == []


def test_a_checkpoint_that_is_a_link_is_pruned_and_its_target_stays(
    whole: Path, copy: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    link = copy / "checkpoints" / "update-000001"
    link.replace(target)
    link.symlink_to(target)
    number = len(list(target.rglob("*")))
    train(None, resume=copy, accepts_changes=True)
    assert len(list(target.rglob("*"))) == number
    prune_checkpoints(copy / "checkpoints", 1)
    assert not os.path.lexists(link)
    assert [one.name for one in in_order(copy / "checkpoints")] == ["update-000003"]
    assert len(list(target.rglob("*"))) == number
    write_again = copy / "checkpoints" / ".update-000009.partial"
    write_again.symlink_to(target)
    tidy(copy / "checkpoints")
    assert not os.path.lexists(write_again) and len(list(target.rglob("*"))) == number


@pytest.mark.parametrize("name", ["trees", "checkpoints", "buffer", "buffer/traces.sqlite"])
def test_a_resume_refuses_links_out_of_the_run_folder(
    copy: Path, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "elsewhere" / "victim"
    victim.parent.mkdir()
    (copy / name).replace(victim)
    (copy / name).symlink_to(victim)
    files = [one for place in (copy, victim.parent) for one in place.rglob("*") if one.is_file()]
    before = {one: (one.stat().st_mtime_ns, file_checksum(one)) for one in files}
    for accepts in (False, True):
        with raises_code("run-entry-foreign") as told:
            train(None, resume=copy, accepts_changes=accepts)
        assert f"{name} is a link to '{victim}'" in str(told.value)
    after = [one for place in (copy, victim.parent) for one in place.rglob("*") if one.is_file()]
    assert {one: (one.stat().st_mtime_ns, file_checksum(one)) for one in after} == before


def test_a_run_folder_reached_through_a_link_goes_on(
    whole: Path, copy: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(copy)
    train(None, resume=link)
    assert differing(whole, copy) == []


def test_a_checkpoint_of_0_6_is_refused_in_one_sentence(copy: Path) -> None:
    def old(data: dict[str, Any]) -> None:
        data["format_version"] = 1
        del data["beside"], data["checksum"]

    edit(STATE, old)(copy)
    with raises_code("checkpoint-version"):
        train(None, resume=copy)


def test_the_copy_of_another_runs_buffer_is_not_rolled_back_into_it(
    whole: Path, tmp_path: Path
) -> None:
    """Traces that another run added in its update 3 are there before update 1 of this one."""
    with TraceBuffer(whole / OWN_FILE, None) as buffer:
        before = list(buffer)
    foreign = {"path": str(whole / OWN_FILE), "encoder": "hashing", "grow": {"num_best": 1}}
    run = train(
        settings(tmp_path, buffer=foreign, run={**settings(tmp_path)["run"], "num_updates": 1})
    )
    train(None, resume=run.run_dir)
    longer = json.loads((run.run_dir / "config.json").read_text())
    longer["run"]["num_updates"] = 2
    train(longer, resume=run.run_dir)
    with TraceBuffer(run.run_dir / OWN_FILE, None) as buffer:
        assert list(buffer)[: len(before)] == before


@pytest.mark.parametrize("kind", ["file", "DataFrame"])
def test_law_16_tasks_do_not_change_unseen(kind: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")

    def tasks(num_more: int) -> Any:
        rows = [
            {"question": f"w{n} and w{n + 1}", "answer": f"w{n + num_more}", "seen": {f"w{n}"}}
            for n in range(6)
        ]
        if kind == "DataFrame":
            return pandas.DataFrame(rows)
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(one, default=list) + "\n" for one in rows))
        return path

    def run(num_more: int, num_updates: int, **more: Any) -> Path:
        about = {"name": "a", "dir": str(tmp_path), "num_updates": num_updates}
        more |= {"tasks": tasks(num_more), "rewards": "exact_match", "display": False}
        own = tiny(run=about, warmup={"num_steps": 0}, eval={"every": 0, "at_start": False})
        own |= {"tasks": {"num_eval": 1}, "reward": {}}
        own["rollout"] |= {"max_tool_calls": 0}
        return train(own, **more).run_dir

    folder = run(0, 1)
    with raises_code("inputs-changed"):
        run(1, 2, resume=folder)
    run(0, 2, resume=folder)
    run(1, 3, resume=folder, accepts_changes=True)
    # Checkpoints of 0.7 hold no checksum of the tasks.
    place = in_order(folder / "checkpoints")[-1]
    state = replace(read_state(place), beside={})
    path = place / "treegraft" / "state.json"
    path.write_text(state_json(state, json.loads(path.read_text())["checksums"]))
    treegraft.trust(folder)
    run(0, 4, resume=folder)


def test_a_checksum_sees_everything_and_is_the_same_after_a_roll_back(tmp_path: Path) -> None:
    def trace(number: int) -> Trace:
        return Trace(f"key {number}", "value", 1.0, "self", "task", number, False, "first")

    with TraceBuffer(tmp_path / "a.sqlite", "hashing") as buffer:
        buffer.add([trace(1), trace(2)])
        first = buffer.checksum()
        assert buffer.checksum(0) == buffer.checksum() == first
        buffer.add([trace(3)], update=1)
        second = buffer.checksum()
        assert second not in (first, "") and buffer.checksum(1) == second
        assert buffer.checksum(0) == first
        with TraceBuffer(tmp_path / "a.sqlite", "hashing") as other:
            assert other.checksum() == second
        # A known step of a further trajectory is a change too.
        buffer.add([Trace("key 1", "value", 0.5, "self", "task", 1, False, "second")], update=2)
        assert buffer.checksum() != second
        buffer.roll_back(1)
        assert buffer.checksum() == second
        buffer.roll_back(0)
        assert buffer.checksum() == first
    assert file_checksum(tmp_path / "a.sqlite", 0) != file_checksum(tmp_path / "a.sqlite")
