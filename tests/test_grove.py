"""Trees for a loop of one's own: opened in any way, beside others, without files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft import (
    DataError,
    ScriptedEngine,
    TraceBuffer,
    Tree,
    load_config,
    read_trees,
)
from treegraft.core.errors import EngineError
from treegraft.parts import Grove, grove
from treegraft.view.runs import RunReader

SMALL = {"run": {"seed": 5}, "loss": {"graft_coef": 0.0}}
GRAFTED: dict[str, Any] = {
    **SMALL,
    "explore": {"explorers": ["graft"], "graft": {"num_hybrid": 2, "probability": 1.0}},
    "buffer": {"path": "expert", "encoder": "hashing"},
}


def agent(path: str) -> str:
    """Searches once, then answers what it has read."""
    relation, _, entity, *_ = path.split()
    if "</result>" in path:
        return f"<answer> \\boxed{{ {path.split('<result>')[1].split()[-2]} }} </answer>"
    return f"<search> {entity} {relation} </search>"


@pytest.fixture(scope="module")
def scripted() -> Callable[..., ScriptedEngine]:
    with grove(tiny(**SMALL)) as my_grove:
        tokenizer = my_grove.tokenizer
    return lambda **how: ScriptedEngine(agent, tokenizer, **how)


def tokens(trees: list[Tree]) -> list[Any]:
    """All that was sampled and how it was rated."""
    return [
        ([step.token_ids.tolist() for step in tree.steps], [leaf.advantage for leaf in tree.leaves])
        for tree in trees
    ]


# ---------------------------------------------------------------------- ways to open it


def test_every_way_of_opening_gives_the_same_trees() -> None:
    config = load_config(tiny(**SMALL))
    with grove(config) as my_grove:
        expected = tokens(my_grove.grow(my_grove.tasks[:2], 1))
        other = tokens(my_grove.grow(my_grove.tasks[:2], 2))
    assert other != expected and len(expected[0][1]) == 4

    async def awaited() -> list[Any]:
        async with grove(config) as my_grove:
            return tokens(await my_grove.agrow(my_grove.tasks[:2], 1))

    async def in_a_notebook() -> list[Any]:
        """An event loop runs already, and the plain form is used; its trees can be awaited too."""
        with grove(config) as my_grove:
            first = tokens(my_grove.grow(my_grove.tasks[:2], 1))
            assert first == tokens(await my_grove.agrow(my_grove.tasks[:2], 1))
            return first

    assert asyncio.run(awaited()) == asyncio.run(in_a_notebook()) == expected


def test_the_plain_form_does_not_wait_for_the_loop_it_stands_on(scripted: Any) -> None:
    async def blocked() -> None:
        async with grove(tiny(**SMALL), engine=scripted()) as my_grove:
            with raises_code("grove-on-this-loop"):
                my_grove.grow(my_grove.tasks[:1], 1)
            # From another thread it may wait.
            trees = await asyncio.to_thread(my_grove.grow, my_grove.tasks[:1], 1)
            assert len(trees) == 1

    asyncio.run(blocked())


def test_two_groves_share_nothing() -> None:
    """Grown in turns, with settings that differ, they give what each gives alone."""

    def grown(my_grove: Grove) -> list[Any]:
        return tokens(my_grove.grow(my_grove.tasks[:2], 3))

    one, other = load_config(tiny(**SMALL)), load_config(tiny(**SMALL, explore={"num_leaves": 3}))
    with grove(one) as my_grove:
        alone = [grown(my_grove)]
    with grove(other) as my_grove:
        alone.append(grown(my_grove))
    with grove(one) as first, grove(other) as second:
        first.publish([(name, 0 * w) for name, w in first.learner.weights()], 1)
        assert second.engine.policy_version == 0 and grown(first) != alone[0]
        assert grown(second) == alone[1]
        first.publish(first.learner.weights(), 2)
        assert grown(first) == alone[0]


def test_it_is_open_inside_its_block_alone(scripted: Any) -> None:
    my_grove = grove(tiny(**SMALL), engine=scripted())
    with raises_code("grove-not-open"):
        my_grove.grow([], 1)
    for _ in range(2):
        with my_grove:
            assert len(my_grove.grow(my_grove.tasks[:1], 1)) == 1
            with raises_code("grove-open"), my_grove:
                pass
    with raises_code("grove-not-open"):
        _ = my_grove.tasks


def test_ctrl_c_ends_the_wait_and_the_thread(scripted: Any) -> None:
    engine = scripted(latency_s=lambda *_: 60.0)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), grove(tiny(**SMALL), engine=engine) as my_grove:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        my_grove.grow(my_grove.tasks[:1], 1)
    assert threading.active_count() <= before


# ---------------------------------------------------------------------- bad input


def test_bad_input_is_one_sentence_before_any_work(scripted: Any, tmp_path: Path) -> None:
    with raises_code("unknown-setting"):
        grove({"explore": {"num_leavs": 2}})
    with raises_code("engine-invalid"):
        grove(tiny(**SMALL), engine="native")  # type: ignore[arg-type]
    gone = tiny(**GRAFTED | {"buffer": {"path": str(tmp_path / "gone.sqlite")}})
    with raises_code("buffer-missing"), grove(gone):
        pass
    with grove(tiny(**SMALL), engine=scripted()) as my_grove:
        task = my_grove.tasks[0]
        for tasks, number, code in (
            ([task], -1, "update-number-invalid"),
            ([task], "1", "update-number-invalid"),
            (["t"], 1, "no-task"),
            ([task, task], 1, "task-twice"),
        ):
            with raises_code(code):
                my_grove.grow(tasks, number)  # type: ignore[arg-type]
        with pytest.raises(DataError):
            my_grove.grow([replace(task, id="own", question="r1 " * 200)], 1)


def test_lessons_of_a_buffer() -> None:
    """Of the expert's: at most one for each task, and draws of earlier tasks."""
    recipe = tiny(**GRAFTED | {"loss": {"lesson_coef": 0.5}, "learn": {"num_lessons": 2}})
    with grove(recipe) as my_grove:
        given = []
        for number in (1, 2):
            tasks = my_grove.tasks[3 * number : 3 * number + 3]
            given.append(my_grove.lessons(my_grove.grow(tasks, number), number))
            names = [tree.task.id for tree in given[-1]]
            assert {task.id for task in tasks} <= set(names) and len(set(names)) == len(names)
        assert len(given[0]) == 3 and 3 < len(given[1]) <= 5
        assert all(0 <= tree.leaves[0].advantage <= 1 for trees in given for tree in trees)
    with grove(tiny()) as plain:
        assert plain.lessons(plain.grow(plain.tasks[:1], 1), 1) == []


# ---------------------------------------------------------------------- engines and weights


def test_an_engine_of_ones_own_stays_ones_own(scripted: Any) -> None:
    engine = scripted()
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    engine.close = close
    with grove(tiny(**SMALL), engine=engine) as my_grove:
        assert my_grove.engine is engine
        own = replace(my_grove.tasks[0], id="mine")
        [tree] = my_grove.grow([own], 7)
    assert not closed and tree.group_id == "7/mine" and len(tree.leaves) == 4
    assert tree.leaves[0].reward is not None and tree.leaves[0].weight == 0.25
    assert tree.steps[1].content.calls[0].name == "search"


def test_weights_are_published_whole_or_not_at_all() -> None:
    with grove(tiny(**SMALL)) as my_grove:
        named = dict(my_grove.learner.weights())
        my_grove.publish({name: weight + 0.5 for name, weight in named.items()}, 4)
        held, found = my_grove.engine.fingerprint, my_grove.grow(my_grove.tasks[:1], 1)
        assert {step.policy_version for step in found[0].steps[1:]} == {4}
        named.popitem()
        with pytest.raises(EngineError):
            my_grove.publish(named, 5)
        assert (my_grove.engine.fingerprint, my_grove.engine.policy_version) == (held, 4)


LOOPS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "adapters": {"model": {"lora": {"rank": 4, "alpha": 8}}},
    "adapters apart": {"model": {"lora": {"rank": 4, "alpha": 8, "merge": False}}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "a reference": {"loss": {"graft_coef": 0.0, "kl_coef": 0.5}},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("kind", LOOPS)
def test_a_checkpoint_goes_on(kind: str, tmp_path: Path) -> None:
    """Two updates, saved, and a third in another grove: the weights of three in one. Adapters and a
    reference belong to the model that the loop began with, and are refused on the checkpoint's."""
    tables = tiny(
        **{**SMALL, **LOOPS[kind]},
        learn={"lr": 1e-2},
        reward={"funcs": ["tests.test_grove:length"]},
    )

    def learn(my_grove: Grove, numbers: range) -> None:
        for number in numbers:
            my_grove.learner.learn(my_grove.grow(my_grove.tasks[:3], number))
            my_grove.publish(my_grove.learner.weights(), number)

    with grove(tables) as my_grove:
        learn(my_grove, range(1, 3))
        my_grove.save(tmp_path / "agent", 2)
        learn(my_grove, range(3, 4))
        expected = dict(my_grove.learner.weights())
    with grove(tables) as my_grove:
        before = {name: weight.clone() for name, weight in my_grove.learner.weights()}
        my_grove.learner.load(tmp_path / "agent")
        my_grove.publish(my_grove.learner.weights(), 2)
        learn(my_grove, range(3, 4))
        found = dict(my_grove.learner.weights())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(found[name], before[name]) for name in before)
    tables["model"] = {**tables["model"], "path": str(tmp_path / "agent")}
    with grove(tables) as my_grove:
        if kind in ("full weights", "bfloat16"):
            my_grove.learner.load(tmp_path / "agent")
            learn(my_grove, range(3, 4))
            found = dict(my_grove.learner.weights())
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        else:
            with raises_code("loaded-onto-itself"):
                my_grove.learner.load(tmp_path / "agent")


def test_a_falling_learning_rate_needs_an_end(scripted: Any) -> None:
    """Without one it would be that of `train`'s default number of updates."""
    tables = tiny(learn={"schedule": "linear", "lr": 0.4, "num_minibatches": 1})
    tables["run"] = {"num_threads": 1}
    with grove(tables, engine=scripted()) as my_grove, raises_code("schedule-without-end"):
        _ = my_grove.learner
    tables["run"] = {"num_threads": 1, "num_updates": 2}
    with grove(tables, engine=scripted()) as my_grove:
        optimiser = my_grove.learner.optimiser
        rates = []
        for _ in range(3):
            optimiser.step()
            rates.append(optimiser.last_lr)
    assert rates == pytest.approx([0.4, 0.2, 0.0])


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward by which rollouts of random weights differ."""
    return [float(len(text) % 7) for text in completions]


# ---------------------------------------------------------------------- the buffer


def test_grafts_without_a_folder(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    grown = GRAFTED | {"buffer": {**GRAFTED["buffer"], "grow": {"num_best": 1}}}
    with grove(tiny(**grown), engine=scripted()) as my_grove:
        trees = my_grove.grow(my_grove.tasks[:3], 1)
        first = my_grove.take_metrics(trees)
        my_grove.remember(trees, 1)
        second = my_grove.take_metrics(trees)
    assert first["graft/num_grafts"] > 0 and first["buffer/num_own"] == 0
    assert second["buffer/num_own"] > 0 and second["buffer/num_traces"] > first["buffer/num_traces"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_best", [0, 1])
def test_a_buffers_file_is_never_written_to(scripted: Any, tmp_path: Path, num_best: int) -> None:
    made = tmp_path / "expert.sqlite"
    with grove(tiny(**GRAFTED), engine=scripted()) as my_grove:
        buffer = my_grove._open().buffer.buffer
        assert buffer is not None and buffer.stats().num_bytes == 0
        buffer.copy_to(made)
    with TraceBuffer(made, "hashing") as buffer:
        before, traces = buffer.checksum(), len(buffer)
    table = {"path": str(made), "encoder": "hashing", "grow": {"num_best": num_best}}
    with grove(tiny(**GRAFTED | {"buffer": table}), engine=scripted()) as my_grove:
        trees = my_grove.grow(my_grove.tasks[:3], 1)
        my_grove.remember(trees, 1)
        metrics = my_grove.take_metrics(trees)
    assert metrics["graft/num_grafts"] > 0
    assert (metrics["buffer/num_own"] > 0) == (num_best > 0)
    assert metrics["buffer/num_traces"] == traces + metrics["buffer/num_own"]
    with TraceBuffer(made, "hashing") as buffer:
        assert buffer.checksum() == before
    assert [file.name for file in tmp_path.iterdir()] == ["expert.sqlite"]


def test_a_copy_in_memory_finds_the_same(tmp_path: Path) -> None:
    from treegraft import StepContent, Trace

    def trace(n: int) -> Trace:
        return Trace(f"r{n} of e1 ?", StepContent(answer=f"e{n}"), n / 4, "x", f"t{n}", 0, False)

    with TraceBuffer(tmp_path / "a.sqlite", "hashing") as buffer:
        buffer.add([trace(n) for n in range(4)], update=1)
        buffer.evict(3, source="x", update=2)
        with buffer.in_memory() as copy:
            assert [*copy] == [*buffer] and len(copy) == 3
            assert copy.search(["r2 of e1 ?"], 2) == buffer.search(["r2 of e1 ?"], 2)
            # As in a copied file, the marks of updates stay behind.
            copy.add([trace(7)], update=1)
            copy.roll_back(0)
            assert [*copy] == [*buffer]


def test_a_loop_s_trees_are_recorded_for_the_viewer(tmp_path: Path) -> None:
    """An update that comes again replaces itself and what followed; a model is published as it
    is."""
    with grove(tiny(**SMALL)) as trees_of:
        trees = trees_of.grow(trees_of.tasks[:2], 1)
        for number in (1, 2, 3, 2):
            trees_of.record(tmp_path, trees, number, {"reward/mean": float(number)})
        trees_of.publish(trees_of.learner.model, 1)
        assert trees_of.engine.policy_version == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    names = [file.name for file in RunReader(tmp_path).files()]
    assert names == ["update-000001", "update-000002"]
    assert read_trees(tmp_path) == [*trees, *trees]
