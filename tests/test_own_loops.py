"""Trees for a loop of one's own: opened in any way, beside others, without files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft import (
    DataError,
    ScriptedEngine,
    Session,
    Task,
    TraceBuffer,
    Tree,
    load_config,
    read_trees,
)
from treegraft.core.errors import EngineError
from treegraft.view.runs import RunReader

SMALL = {"run": {"seed": 5}, "loss": {"graft_coef": 0.0}}
GRAFTED: dict[str, Any] = {
    **SMALL,
    "explore": {"explorers": ["graft"], "graft": {"num_hybrid": 2, "probability": 1.0}},
    "buffer": {"path": "expert", "encoder": "hashing"},
}


def opened(recipe: Any, **how: Any) -> Session:
    """A session whose learner, if any, is made when it is asked for."""
    return Session(recipe, learns=False, **how)


def grow(session: Session, tasks: Sequence[Task], number: int) -> list[Tree]:
    """Scored and credited trees."""
    return list(session.credit(session.sample(number, tasks)))


async def agrow(session: Session, tasks: Sequence[Task], number: int) -> list[Tree]:
    """The same, awaited."""
    return list(session.credit(await session.asample(number, tasks)))


def agent(path: str) -> str:
    """Searches once, then answers what it has read."""
    relation, _, entity, *_ = path.split()
    if "</result>" in path:
        return f"<answer> \\boxed{{ {path.split('<result>')[1].split()[-2]} }} </answer>"
    return f"<search> {entity} {relation} </search>"


@pytest.fixture(scope="module")
def scripted() -> Callable[..., ScriptedEngine]:
    with opened(tiny(**SMALL)) as session:
        tokenizer = session.tokenizer
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
    with opened(config) as session:
        expected = tokens(grow(session, session.tasks[:2], 1))
        other = tokens(grow(session, session.tasks[:2], 2))
    assert other != expected and len(expected[0][1]) == 4

    async def awaited() -> list[Any]:
        async with opened(config) as session:
            return tokens(await agrow(session, session.tasks[:2], 1))

    async def in_a_notebook() -> list[Any]:
        """An event loop runs already, and the plain form is used; its trees can be awaited too."""
        with opened(config) as session:
            first = tokens(grow(session, session.tasks[:2], 1))
            assert first == tokens(await agrow(session, session.tasks[:2], 1))
            return first

    assert asyncio.run(awaited()) == asyncio.run(in_a_notebook()) == expected


def test_the_plain_form_does_not_wait_for_the_loop_it_stands_on(scripted: Any) -> None:
    async def blocked() -> None:
        async with opened(tiny(**SMALL), engine=scripted()) as session:
            with raises_code("session-on-this-loop"):
                grow(session, session.tasks[:1], 1)
            # From another thread it may wait.
            trees = await asyncio.to_thread(grow, session, session.tasks[:1], 1)
            assert len(trees) == 1

    asyncio.run(blocked())


def test_two_sessions_share_nothing() -> None:
    """Grown in turns, with settings that differ, they give what each gives alone."""

    def grown(session: Session) -> list[Any]:
        return tokens(grow(session, session.tasks[:2], 3))

    one = load_config(tiny(**SMALL))
    other = load_config(tiny(**SMALL, explore={"num_leaves": 3}))
    with opened(one) as session:
        alone = [grown(session)]
    with opened(other) as session:
        alone.append(grown(session))
    with opened(one) as first, opened(other) as second:
        first.sync_weights(1, [(name, 0 * w) for name, w in first.learner.weights()])
        assert second.engine.policy_version == 0 and grown(first) != alone[0]
        assert grown(second) == alone[1]
        first.sync_weights(2, first.learner.weights())
        assert grown(first) == alone[0]


def test_it_is_open_inside_its_block_alone(scripted: Any) -> None:
    session = opened(tiny(**SMALL), engine=scripted())
    with raises_code("session-not-open"):
        grow(session, [], 1)
    for _ in range(2):
        with session:
            assert len(grow(session, session.tasks[:1], 1)) == 1
            with raises_code("session-open"), session:
                pass
    with raises_code("session-not-open"):
        _ = session.tasks


def test_ctrl_c_ends_the_wait_and_the_thread(scripted: Any) -> None:
    engine = scripted(latency_s=lambda *_: 60.0)
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt), opened(tiny(**SMALL), engine=engine) as session:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        grow(session, session.tasks[:1], 1)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(30)
            assert not thread.is_alive(), thread


# ---------------------------------------------------------------------- bad input


def test_bad_input_is_one_sentence_before_any_work(scripted: Any, tmp_path: Path) -> None:
    with raises_code("unknown-setting"):
        opened({"explore": {"num_leavs": 2}})
    with raises_code("engine-invalid"):
        opened(tiny(**SMALL), engine="native")  # type: ignore[arg-type]
    gone = tiny(**GRAFTED | {"buffer": {"path": str(tmp_path / "gone.sqlite")}})
    with raises_code("buffer-missing"), opened(gone):
        pass
    with opened(tiny(**SMALL), engine=scripted()) as session:
        task = session.tasks[0]
        for tasks, number, code in (
            (["t"], 1, "no-task"),
            ([task, task], 1, "task-twice"),
        ):
            with raises_code(code):
                grow(session, tasks, number)  # type: ignore[arg-type]
        with pytest.raises(DataError):
            grow(session, [replace(task, id="own", question="r1 " * 200)], 1)


def test_lessons_of_a_buffer() -> None:
    """Of the expert's: at most one for each task, and draws of earlier tasks."""
    recipe = tiny(**GRAFTED | {"loss": {"lesson_coef": 0.5}, "learn": {"num_lessons": 2}})
    with opened(recipe) as session:
        given = []
        for number in (1, 2):
            tasks = session.tasks[3 * number : 3 * number + 3]
            given.append(session.lessons(grow(session, tasks, number), number))
            names = [tree.task.id for tree in given[-1]]
            assert {task.id for task in tasks} <= set(names) and len(set(names)) == len(names)
        assert len(given[0]) == 3 and 3 < len(given[1]) <= 5
        assert all(0 <= tree.leaves[0].advantage <= 1 for trees in given for tree in trees)
    with opened(tiny()) as plain:
        assert plain.lessons(grow(plain, plain.tasks[:1], 1), 1) == []


# ---------------------------------------------------------------------- engines and weights


def test_an_engine_of_ones_own_stays_ones_own(scripted: Any) -> None:
    engine = scripted()
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    engine.close = close
    with opened(tiny(**SMALL), engine=engine) as session:
        assert session.engine is engine
        own = replace(session.tasks[0], id="mine")
        [tree] = grow(session, [own], 7)
    assert not closed and tree.group_id == "7/mine" and len(tree.leaves) == 4
    assert tree.leaves[0].reward is not None and tree.leaves[0].weight == 0.25
    assert tree.steps[1].content.calls[0].name == "search"


def test_weights_are_published_whole_or_not_at_all() -> None:
    with opened(tiny(**SMALL)) as session:
        named = dict(session.learner.weights())
        session.sync_weights(4, {name: weight + 0.5 for name, weight in named.items()})
        held = session.engine.fingerprint
        found = grow(session, session.tasks[:1], 1)
        assert {step.policy_version for step in found[0].steps[1:]} == {4}
        named.popitem()
        with pytest.raises(EngineError):
            session.sync_weights(5, named)
        assert (session.engine.fingerprint, session.engine.policy_version) == (held, 4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("more", [{"model": {"lora": {"rank": 4}}}, {"loss": {"kl_coef": 0.5}}])
def test_adapters_and_a_reference_are_not_loaded_onto_their_own_checkpoint(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """They belong to the model that the loop began with."""
    tables = tiny(**{**SMALL, **more})
    with opened(tables) as session:
        session.save(tmp_path / "agent")
    tables["model"] = {**tables["model"], "path": str(tmp_path / "agent")}
    with opened(tables) as session, raises_code("loaded-onto-itself"):
        session.learner.load(tmp_path / "agent")


def test_a_falling_learning_rate_needs_an_end(scripted: Any) -> None:
    """Without one it would be that of `train`'s default number of updates."""
    tables = tiny(learn={"schedule": "linear", "lr": 0.4, "num_minibatches": 1})
    tables["run"] = {"num_threads": 1}
    with opened(tables, engine=scripted()) as session, raises_code("schedule-without-end"):
        _ = session.learner
    tables["run"] = {"num_threads": 1, "num_updates": 2}
    with opened(tables, engine=scripted()) as session:
        optimiser = session.learner.optimiser
        rates = []
        for _ in range(3):
            optimiser.step()
            rates.append(optimiser.last_lr)
    assert rates == pytest.approx([0.4, 0.2, 0.0])


# ---------------------------------------------------------------------- the buffer


def test_grafts_without_a_folder(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    grown = GRAFTED | {"buffer": {**GRAFTED["buffer"], "grow": {"num_best": 1}}}
    with opened(tiny(**grown), engine=scripted()) as session:
        trees = grow(session, session.tasks[:3], 1)
        first = session.pop_metrics(trees)
        session.remember(trees, 1)
        second = session.pop_metrics(trees)
    assert first["graft/num_grafts"] > 0 and first["buffer/num_own"] == 0
    assert second["buffer/num_own"] > 0 and second["buffer/num_traces"] > first["buffer/num_traces"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_best", [0, 1])
def test_a_buffers_file_is_never_written_to(scripted: Any, tmp_path: Path, num_best: int) -> None:
    made = tmp_path / "expert.sqlite"
    with opened(tiny(**GRAFTED), engine=scripted()) as session:
        buffer = session.buffer.buffer
        assert buffer is not None
        buffer.copy_to(made)
    with TraceBuffer(made, "hashing") as buffer:
        before = buffer.checksum()
        traces = len(buffer)
    table = {"path": str(made), "encoder": "hashing", "grow": {"num_best": num_best}}
    with opened(tiny(**GRAFTED | {"buffer": table}), engine=scripted()) as session:
        trees = grow(session, session.tasks[:3], 1)
        session.remember(trees, 1)
        metrics = session.pop_metrics(trees)
    assert metrics["graft/num_grafts"] > 0
    assert (metrics["buffer/num_own"] > 0) == (num_best > 0)
    assert metrics["buffer/num_traces"] == traces + metrics["buffer/num_own"]
    with TraceBuffer(made, "hashing") as buffer:
        assert buffer.checksum() == before
    assert [file.name for file in tmp_path.iterdir()] == ["expert.sqlite"]


def test_a_loop_s_trees_are_recorded_for_the_viewer(tmp_path: Path) -> None:
    """An update that comes again replaces itself and what followed; a model is published as it
    is."""
    with opened(tiny(**SMALL)) as trees_of:
        trees = grow(trees_of, trees_of.tasks[:2], 1)
        for number in (1, 2, 3, 2):
            trees_of.record(tmp_path, trees, number, {"reward/mean": float(number)})
        trees_of.sync_weights(1, trees_of.learner.model)
        assert trees_of.engine.policy_version == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    names = [file.name for file in RunReader(tmp_path).files()]
    assert names == ["update-000001", "update-000002"]
    assert read_trees(tmp_path) == [*trees, *trees]
