"""Trees that one process orders and another grows: they are those of a run in one process, grafts
from the state of the buffer that the order names included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.tiny import differing, tiny

from treegraft.assemble import assemble_engine
from treegraft.core.interfaces import Engine
from treegraft.core.registry import Entry
from treegraft.core.types import GraftCause, StepContent, Task, ToolCall, Trace
from treegraft.runs.record import read_trees
from treegraft.settings.config import Config
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps
from treegraft.traces.remote import (
    BufferStates,
    RemoteTrees,
    TreeHost,
)
from treegraft.train import train

GRAFTING: Mapping[str, Any] = {
    "explore": {"explorers": ["graft"], "num_leaves": 4, "graft": {"num_hybrid": 3}},
    "buffer": {"path": "expert", "encoder": "hashing", "random_prob": 0.2}
    | {"grow": {"num_best": 2}},
    # An agent that now and then answers well, so that the buffer grows.
    "warmup": {"batch_size": 12},
}


class Elsewhere:
    """A placement whose trees grow in a host of this process, of which all that travels is JSON."""

    orders: ClassVar[list[dict[str, Any]]] = []

    @asynccontextmanager
    async def engine(self, config: Config, model_path: Path | str | None) -> AsyncIterator[Engine]:
        async with (
            assemble_engine(config, model_path=model_path) as engine,
            TreeHost.opened(config, engine, model_path=model_path) as host,
        ):

            async def ask(order: dict[str, Any], name: str) -> Any:
                assert order["group_id"] == name
                self.orders.append(order)
                return json.loads(json.dumps(await host.grow(json.loads(json.dumps(order)))))

            self._trees = RemoteTrees(config, ask)
            try:
                yield engine
            finally:
                self._trees.close()

    def grower(self, *parts: Any, **more: Any) -> Any:
        return self._trees.grower(*parts, **more)

    def show_in(self, folder: Path) -> None:
        self._trees.show_in(folder)


def placed(config: Config) -> AbstractContextManager[Elsewhere]:
    """The maker of the placement, as an extension names it."""
    return nullcontext(Elsewhere())


def test_a_run_whose_trees_grow_elsewhere_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry("placement", "elsewhere", f"{__name__}:placed", facts={"command": "train"})
    known = {"placement": {"elsewhere": entry}}
    monkeypatch.setattr("treegraft.launch.registered", lambda of: known.get(of, {}))
    Elsewhere.orders.clear()
    for name, placement in (("alone", None), ("spread", "elsewhere")):
        tables = {**GRAFTING, "run": {"dir": str(tmp_path), "name": name, "num_updates": 3}}
        train(tiny(**tables), display=False, placement=placement)
    alone = tmp_path / "alone"
    spread = tmp_path / "spread"
    assert [name for name in differing(alone, spread) if not name.endswith("config.json")] == []
    assert any(
        isinstance(step.cause, GraftCause) for tree in read_trees(spread) for step in tree.steps
    )
    # The buffer grows by the agent's best, so updates differ in their states; evaluations have
    # none.
    states = {order["state"] for order in Elsewhere.orders}
    assert None in states and len(states) >= 3
    assert not list((spread / "buffer" / "states").iterdir())


NUM_TASKS = 12
TASKS = [Task(id=f"t/{n}", question=f"r{n} ?", reference=("e1",)) for n in range(NUM_TASKS)]


def traces(number: int, source: str, reward: float = 1.0) -> list[Trace]:
    """A stored trajectory of a task: two calls and an answer."""
    calls = [
        StepContent(thought=f"{source} {step}", calls=(ToolCall("search", f"e{number} r{step}"),))
        for step in range(2)
    ]
    steps = [*calls, StepContent(thought="so", answer=f"e{number}")]
    place = {"source": source, "trajectory": f"{source}/{number}"}
    task = TASKS[number]
    return list(split_steps(task.id, task.question, steps, reward=reward, **place))


@contextmanager
def filled(folder: Path) -> Iterator[TraceBuffer]:
    with TraceBuffer(folder / "b.sqlite", "hashing") as buffer:
        for number in range(NUM_TASKS):
            buffer.add(traces(number, "expert"))
        yield buffer


def test_a_state_stays_what_it_was(tmp_path: Path) -> None:
    states = BufferStates(tmp_path / "states")
    with filled(tmp_path) as buffer:
        first = states.take(buffer)
        before = Path(first).read_bytes()
        assert states.take(buffer) == first
        buffer.add(traces(1, "self", 0.5), update=1)
        assert Path(first).read_bytes() == before
        # The next one takes its place.
        second = states.take(buffer)
        assert second != first and [str(one) for one in (tmp_path / "states").iterdir()] == [second]
    # What a process that was killed has left there goes.
    BufferStates(tmp_path / "states")
    assert not list((tmp_path / "states").iterdir())
