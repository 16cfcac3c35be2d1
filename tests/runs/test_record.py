"""Records: trees to lines and back, damaged files, atomic writing, cutting a run back to a
checkpoint."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree, recorded_trees

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.given import GivenObjects
from treegraft.core.steps import observation_from
from treegraft.core.types import (
    BranchCause,
    BranchDecision,
    Observation,
    StepContent,
    Task,
    ToolCall,
    Trace,
    Tree,
)
from treegraft.runs import record, run, tree_files
from treegraft.runs.display import NoDisplay
from treegraft.runs.open import find_checkpoint
from treegraft.runs.record import RunFolder, read_metrics, read_trees
from treegraft.runs.run import Run
from treegraft.runs.tree_files import drop_parts, parts_in, write_trees
from treegraft.runs.tree_json import tree_from_json, tree_to_json
from treegraft.session import Session
from treegraft.settings.load import load_config
from treegraft.train import train

TREE = build_tree(Part.of("pp", Part.of("sst", Part("s", reward=1.0)), Part("Ss")))


@given(recorded_trees())
@at_most(60)
def test_a_tree_comes_back_equal(tree: Tree) -> None:
    line = tree_to_json(tree)
    assert "\n" not in line
    assert tree_from_json(line) == tree
    assert tree_to_json(tree_from_json(line)) == line


def test_a_decision_comes_back_equal() -> None:
    decided = replace(
        TREE.steps[2],
        decision=BranchDecision(
            seen=BranchCause(entropy_change=0.1, probability=0.5, rule="x"), num_wanted=1
        ),
    )
    tree = replace(TREE, steps=(*TREE.steps[:2], decided, *TREE.steps[3:]))
    assert tree_from_json(tree_to_json(tree)) == tree


def test_columns_are_written_for_sampled_tokens_only() -> None:
    step = json.loads(tree_to_json(TREE))["steps"][1]
    assert len(step["sampling_logprobs"]) == 2
    assert step["origins"] == [[1, 2], [2, 1]] and step["loss_mask"] == [[1, 2], [0, 1]]


def test_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    trees = [build_tree(Part.of("p", Part("s")), task_id=f"t/{n}") for n in range(4)]
    folder = RunFolder.create(tmp_path / "run", "{}")
    write_trees(folder.trees_path(10), trees[2:])
    write_trees(folder.trees_path(9), trees[:2])
    write_trees(folder.trees_path(10, "greedy"), trees[:1])
    assert read_trees(folder.trees_path(9)) == trees[:2]
    # A run folder or its trees/ gives the training trees, evaluations apart.
    assert read_trees(folder.path) == read_trees(str(folder.trees_dir)) == trees


def test_text_that_is_no_unicode_is_still_recorded(tmp_path: Path) -> None:
    """A lone surrogate, as JSON data sets can hold, must not cost a run its record."""
    task = Task(id="t", question="\ud800 \u2028 é", reference=("\udfff",))
    tree = Tree(task=task, group_id="0/t", steps=TREE.steps, leaves=TREE.leaves)
    write_trees(tmp_path / "trees.jsonl", [tree])
    assert read_trees(tmp_path / "trees.jsonl") == [tree]


def damaged(**changes: object) -> str:
    data = json.loads(tree_to_json(TREE))
    step = data["steps"][1]
    step.update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "[]",
        "3",
        "null",
        '{"group_id": "x"}',
        tree_to_json(TREE)[:-20],
        damaged(sampling_logprobs=[-0.5]),
        damaged(sampling_logprobs=[-0.5, -0.5, -0.5]),
        damaged(origins=[[1, 2]]),
        damaged(origins=[[9, 3]]),
        damaged(cause="start"),
        damaged(cause={"kind": "whim"}),
        damaged(content=None),
        damaged(loss_mask=[[1, 3]]),
        damaged(surprise=1),
        damaged(stop_reason="boredom"),
        damaged(token_ids=None),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text(tree_to_json(TREE) + "\n" + line + "\n")
    with raises_code("tree-unreadable", match="line 2: not a recorded tree"):
        read_trees(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with raises_code("trees-missing"):
        read_trees(tmp_path / "none.jsonl")
    with raises_code("metrics-missing"):
        read_metrics(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with raises_code("no-metrics-yet"):
        read_metrics(tmp_path)


def test_a_run_is_cut_to_its_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "{}")
    sizes = []
    for update in (1, 2, 3):
        folder.append_metrics(update, {"reward/mean": update / 4, "a": 1.0})
        sizes.append(folder.metrics_size())
        write_trees(folder.trees_path(update), [TREE])
        write_trees(folder.trees_path(update, "greedy"), [TREE])
    write_trees(folder.trees_path(1_000_000), [TREE])
    folder.cut_to(2, sizes[1])
    assert read_metrics(folder.path) == [
        {"update": n, "a": 1.0, "reward/mean": n / 4} for n in (1, 2)
    ]
    assert [part.name for part in parts_in(folder.trees_dir)] == [
        "update-000001",
        "eval-000001-greedy",
        "update-000002",
        "eval-000002-greedy",
    ]
    # A checkpoint that was written before its evaluation: the evaluation comes again.
    folder.cut_to(2, sizes[1], is_closed=False)
    assert [part.name for part in parts_in(folder.trees_dir)] == [
        "update-000001",
        "eval-000001-greedy",
        "update-000002",
    ]
    folder.cut_to(-1, 0)
    assert not [*folder.trees_dir.iterdir()]


def test_a_folder_in_the_way_is_refused_and_a_foreign_one_too(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", '{"a": 1}')
    assert RunFolder.open(tmp_path / "run").metrics_size() == 0
    with raises_code("run-exists"):
        RunFolder.create(tmp_path / "run", "{}")
    assert (tmp_path / "run" / "config.json").read_text() == '{"a": 1}'
    with raises_code("not-a-run"):
        RunFolder.open(tmp_path)


def test_of_starts_of_one_name_exactly_one_makes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None goes on before all have found the name free and have filled their folders.
    together = threading.Barrier(4, timeout=10)
    monkeypatch.setattr(record, "remember", lambda *_: together.wait())
    place = tmp_path / "runs" / "run"

    def start(number: int) -> str:
        try:
            RunFolder.create(place, f'{{"a": {number}}}')
        except CheckpointError as error:
            return error.code
        return str(number)

    with ThreadPoolExecutor(4) as threads:
        ends = sorted(threads.map(start, range(4)))
    assert ends[1:] == ["run-exists"] * 3
    assert (place / "config.json").read_text() == f'{{"a": {ends[0]}}}'
    assert {one.name for one in place.iterdir() if one.is_dir()} == {"trees", "checkpoints"}
    assert [*place.parent.iterdir()] == [place]


def test_starts_without_a_name_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Still:
            return cls(2026, 11, 27, 7, 57, 39, tzinfo=tz)

    monkeypatch.setattr(run, "datetime", Still)
    # The second begins while the first one loads: its folder is not there yet.
    tables = tiny(run={"dir": str(tmp_path), "seed": 3})
    facts = (GivenObjects(), NoDisplay())
    begun = [Run.open(tables, *facts, command="train", recipe="demo") for _ in range(3)]
    names = []
    for one in begun:
        with one, one.recording(cast(Session, None)):  # of which a new run asks nothing yet
            names.append(one.path.name)
    assert names == [f"demo-seed3-20261127-075739{end}" for end in ("", "-2", "-3")]
    assert all((tmp_path / name / "config.json").is_file() for name in names)


def test_a_removed_folder_is_told_and_not_made_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "{}")
    folder.append_metrics(1, {"a": 1.0})
    shutil.rmtree(folder.path)
    with raises_code("run-removed"):
        folder.append_metrics(2, {"a": 1.0})
    assert not folder.path.exists()


def test_a_run_whose_folder_was_removed_at_its_end_does_not_finish(tmp_path: Path) -> None:
    class Removing(NoDisplay):
        def update(self, update: int, num_updates: int, metrics: object) -> None:
            if update == num_updates:
                shutil.rmtree(tmp_path / "a")

    with raises_code("run-removed"):
        train(tiny(run={"name": "a", "dir": str(tmp_path), "num_updates": 1}), display=Removing())
    assert not (tmp_path / "a").exists()


def test_observations_of_0_6_are_read_and_hashes_stay() -> None:
    """The hash was computed by 0.6.0, whose observations had a field `is_cached`."""
    seen = Observation(text="r2 of e9 is e41", is_error=False, is_truncated=False)
    assert observation_from({**asdict(seen), "is_cached": False}) == seen
    step = StepContent(calls=(ToolCall("search", "e9 r2"),), observations=(seen,))
    trace = Trace("r5 of r2 of e9 ?", step, 1.0, "expert", "t", 0, False)
    assert trace.content_hash == "486483c8d6affe7c3139eedd6ac1cd03"


def test_a_missing_run_leads_to_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code("not-a-run"):
        RunFolder.open(Path("runs/first"))
    for name in ("first", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    for place in ("runs/frist", "frist"):
        with raises_code("not-a-run"):
            RunFolder.open(Path(place))
        with raises_code("run-missing"):
            find_checkpoint(place)
    with raises_code("not-a-run"):
        RunFolder.open(Path("zzzzzzzzzzzz"))
    for recipe in ("recipes/demo.toml", "demo"):
        with raises_code("recipe-not-run"):
            find_checkpoint(recipe)


def test_old_trees_are_dropped_and_evaluations_stay(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "{}")
    for number in (1, 2, 10, 11, 100):
        write_trees(folder.trees_path(number), [TREE])
    write_trees(folder.trees_path(1, "greedy"), [TREE])
    drop_parts(folder.trees_dir, 9)
    left = ["eval-000001-greedy", "update-000010", "update-000011", "update-000100"]
    assert [part.name for part in parts_in(folder.trees_dir)] == left


def written(folder: Path) -> RunFolder:
    """A run with updates 1 to 3 of two trees each."""
    run = RunFolder.create(folder / "run", "{}")
    for number in (1, 2, 3):
        write_trees(run.trees_path(number), [TREE, TREE])
    return run


def test_zstd_reads_a_file_as_lines_of_trees(tmp_path: Path) -> None:
    (part, *_) = parts_in(written(tmp_path).trees_dir)
    text = tree_files.zstd.decompress(part.data()).decode()  # type: ignore[attr-defined]
    assert text == 2 * f"{tree_to_json(TREE)}\n"


def test_damage_costs_one_update(tmp_path: Path) -> None:
    folder = written(tmp_path)
    path = folder.trees_dir / "update-000002.jsonl.zst"
    data = path.read_bytes()
    flipped = [data[:n] + bytes([data[n] ^ 64]) + data[n + 1 :] for n in range(0, len(data), 9)]
    for damaged in (*flipped, data[:-1], data[: len(data) // 2 + 3]):
        path.write_bytes(damaged)
        assert read_trees(folder.trees_path(1)) == read_trees(folder.trees_path(3)) == [TREE] * 2
        with raises_code("tree-unreadable"):
            read_trees(folder.trees_path(2))


def test_a_frame_unpacks_to_so_many_bytes_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_files, "_MOST_LINE", 100)
    with raises_code("tree-unreadable"):
        read_trees(written(tmp_path).path)


def test_a_small_file_does_not_unpack_without_end(tmp_path: Path) -> None:
    """Twenty million zeros take 700 bytes; a frame of them may unpack to 4 MB and 1,000 times
    its own size."""
    folder = written(tmp_path)
    bomb = tree_files.zstd.compress(b"0" * 20_000_000)  # type: ignore[attr-defined]
    assert len(bomb) < 4000
    (folder.trees_dir / "update-000002.jsonl.zst").write_bytes(bomb)
    with raises_code("tree-unreadable", match="over [4-7] MB"):
        read_trees(folder.trees_path(2))


def test_a_full_disk_leaves_no_half_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("treegraft.core.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trees(folder.trees_path(4), [TREE])
    assert len([*folder.trees_dir.iterdir()]) == 3


def test_trees_are_read_through_links_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of its own folder, and a folder of trees that lies on another disk."""
    run = written(tmp_path).path
    (run / "trees").rename(tmp_path / "elsewhere")
    (run / "trees").symlink_to(tmp_path / "elsewhere")
    assert read_trees(run) == [TREE] * 6
    monkeypatch.chdir(tmp_path)
    write_trees(Path("mine.jsonl"), [TREE])
    Path("link.jsonl").symlink_to("mine.jsonl")
    assert read_trees("mine.jsonl") == read_trees("link.jsonl") == [TREE]


def test_files_of_lines_are_read_and_cut(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "{}")
    for number in (1, 2):
        (folder.trees_dir / f"update-{number:06d}.jsonl").write_text(f"{tree_to_json(TREE)}\n")
    assert read_trees(folder.trees_dir / "update-000001.jsonl") == [TREE]
    assert read_trees(folder.path) == [TREE] * 2
    folder.cut_to(1, 0)
    assert [path.name for path in folder.trees_dir.iterdir()] == ["update-000001.jsonl"]


def test_a_run_keeps_the_trees_of_its_latest_updates(tmp_path: Path) -> None:
    run = {"name": "a", "dir": str(tmp_path), "num_updates": 3}
    done = train(tiny(run=run, track={"keep_trees": 2}))
    kinds = {(part.update, part.kind) for part in parts_in(done.run_dir / "trees")}
    assert {(0, "greedy"), (2, "update"), (3, "update")} <= kinds and (1, "update") not in kinds
    replaying = {"track": {"keep_trees": 2}, "replay": {"fresh_frac": 0.5}}
    with pytest.raises(SettingError, match=r"track\.keep_trees: got 2, but groups of any earlier"):
        load_config(replaying)
