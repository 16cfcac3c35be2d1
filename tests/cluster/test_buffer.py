"""Buffer replicas on a local Ray cluster: the answers are those of a retriever in one process, in
the state that the question names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.parts import cluster, kill, needs_ray, place_of

from treegraft.core.errors import DeadlineExceeded
from treegraft.core.interfaces import Retrieved, Retriever
from treegraft.core.types import StepContent, Task, ToolCall, Trace
from treegraft.extras.ray.actors import start
from treegraft.extras.ray.buffer import BufferReplica, ReplicaRetriever, States
from treegraft.extras.ray.pool import Pool
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps
from treegraft.traces.retrieve import BufferRetriever

pytestmark = [needs_ray, pytest.mark.slow]
NUM_TASKS = 12
TASKS = [Task(id=f"t/{n}", question=f"r{n} of e{n} ?", reference=("e1",)) for n in range(NUM_TASKS)]


def traces(number: int, source: str, reward: float = 1.0) -> list[Trace]:
    """A stored trajectory of a task: two calls and an answer."""
    calls = [
        StepContent(thought=f"{source} {step}", calls=(ToolCall("search", f"e{number} r{step}"),))
        for step in range(2)
    ]
    steps = [*calls, StepContent(thought="so", answer=f"e{number}")]
    task, place = TASKS[number], {"source": source, "trajectory": f"{source}/{number}"}
    return list(split_steps(task.id, task.question, steps, reward=reward, **place))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    found = load_config(
        {
            "run": {"dir": str(tmp_path_factory.mktemp("runs"))},
            "explore": {"explorers": ["graft"]},
            "buffer": {"path": "b.sqlite", "encoder": "hashing", "random_prob": 0.3},
            "cluster": {"buffer_replicas": 2},
        }
    )
    with cluster(found):
        yield found


@pytest.fixture(scope="module")
def replicas(config: Config) -> list[Any]:
    place = place_of(config)
    return [start(BufferReplica, "buffer", n, place, {"num_cpus": 1}) for n in range(2)]


async def asked(retriever: Retriever) -> list[Retrieved | None]:
    """Every task after one step, for the next step or the rest, with its own key."""
    step = StepContent(thought="expert 0", calls=(ToolCall("search", "e1 r0"),))
    return await asyncio.gather(
        *(
            retriever.retrieve(task, [step], whole=whole, noise_key=(1, "train", 3, task.id, whole))
            for task in TASKS
            for whole in (False, True)
        )
    )


def own_answers(buffer: TraceBuffer, config: Config) -> list[Retrieved | None]:
    retriever = BufferRetriever(buffer, config.buffer)
    try:
        return asyncio.run(asked(retriever))
    finally:
        retriever.close()


def test_answers_are_those_of_the_state_that_is_named(
    config: Config, replicas: list[Any], tmp_path: Path
) -> None:
    states = States(tmp_path / "served")
    pool = Pool(replicas, "buffer replicas", 30.0)
    with TraceBuffer(tmp_path / "b.sqlite", "hashing") as buffer:
        for number in range(NUM_TASKS):
            buffer.add(traces(number, "expert"))
        first, before = states.take(buffer), own_answers(buffer, config)
        # An update adds traces and evicts others; a question of its own trees still means the
        # state that they began with.
        buffer.add(traces(1, "self", 0.5), update=1)
        buffer.evict(4, source="expert", update=1)
        second, after = states.take(buffer), own_answers(buffer, config)
        assert before != after and len(before) == 2 * NUM_TASKS
        assert len({one.similarity == 0.0 for one in before if one is not None}) == 2
        for state, expected in ((first, before), (second, after), (first, before)):
            retriever = ReplicaRetriever(pool, config.buffer, state)
            assert asyncio.run(asked(retriever)) == expected
            counts = retriever.take_metrics()
            assert counts["asked"] == 2 * NUM_TASKS and counts["nothing"] == expected.count(None)
        own = BufferRetriever(buffer, config.buffer)
        # Counts of a replica arrive where the metrics of the run come from.
        own.count(counts)
        assert own.take_metrics()["retrieve/num_asked"] == 2 * NUM_TASKS
        stored = asyncio.run(ReplicaRetriever(pool, config.buffer, second).trajectories(TASKS[1]))
        assert stored == asyncio.run(own.trajectories(TASKS[1])) and stored
        own.close()
        # The same state is the same file; a third one takes the first one's place.
        assert states.take(buffer) == second
        buffer.add(traces(2, "self"), update=2)
        third = states.take(buffer)
        assert sorted(map(str, (tmp_path / "served").iterdir())) == sorted([second, third])
    states.close()
    assert not list((tmp_path / "served").iterdir())


def test_another_replica_answers_where_one_dies(
    config: Config, replicas: list[Any], tmp_path: Path
) -> None:
    import ray

    states = States(tmp_path / "served")
    with TraceBuffer(tmp_path / "b.sqlite", "hashing") as buffer:
        for number in range(NUM_TASKS):
            buffer.add(traces(number, "expert"))
        state, expected = states.take(buffer), own_answers(buffer, config)
    retriever = ReplicaRetriever(Pool(replicas, "buffer replicas", 60.0), config.buffer, state)
    for replica in replicas:
        pid = json.loads(ray.get(replica.state.remote(), timeout=60))["pid"]
        os.kill(pid, signal.SIGKILL)
        assert asyncio.run(asked(retriever)) == expected


def test_no_replica_is_said_after_a_while(config: Config) -> None:
    replica = start(BufferReplica, "buffer", 7, place_of(config), {"num_cpus": 0})
    kill(replica)
    pool = Pool([replica], "buffer replicas", 1.0)
    with pytest.raises(DeadlineExceeded, match="buffer replicas: no answer within 1 s"):
        asyncio.run(ReplicaRetriever(pool, config.buffer, "none").trajectories(TASKS[0]))
