"""The learner's ranks as a job of `treegraft cluster`: placed, killed, started again, stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.nodes import three_nodes
from tests.cluster.parts import needs_ray
from tests.cluster.test_services import trees_of

from treegraft import train
from treegraft.extras.ray.job import environments
from treegraft.extras.ray.placement import place_of
from treegraft.extras.ray.rank import RankActor
from treegraft.runs.tree_files import parts_in
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
SMALL = (
    *("warmup.num_steps=60", "tasks.num_train=40", "tasks.num_eval=4", "eval.every=0"),
    *("run.tasks_per_update=4", "explore.num_leaves=4", "learn.max_pack_tokens=400"),
    *("checkpoint.every=1", "eval.at_start=false", "eval.at_end=false"),
    "tasks.search_world.hops=[1,2]",
)
RANKS = ("cluster.learner_ranks=2", "run.name=run", "run.dir=.")


def test_ranks_get_what_torchrun_would_set() -> None:
    """Three ranks on two machines, the second with one GPU."""
    met = [
        {"address": "10.0.0.1", "gpus": ["2"]},
        {"address": "10.0.0.1", "gpus": ["5"]},
        {"address": "10.0.0.2", "gpus": ["0"]},
    ]
    found = environments(met, 4711)
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["2,5", "2,5", "0"]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in found} == {
        ("10.0.0.1", "4711", "3")
    }


HOLDING = "import subprocess as s; print(s.Popen(['sleep', '60']).pid, 'of two words', end='')"


def test_a_rank_has_ended_though_a_child_of_its_own_holds_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that tells of another one, which it leaves behind with its output, and ends without
    ending its last line."""
    monkeypatch.setattr(logging.getLogger("treegraft"), "handlers", [])

    async def watched() -> list[Any]:
        actor = RankActor("rank", 0, json.dumps(asdict(place_of(Config(), tmp_path / "token"))))
        return [json.loads(one) async for one in actor.run(["-c", HOLDING], {})]

    text, code = asyncio.run(watched())
    left, rest = text.split(maxsplit=1)
    # It is there still: the end was not noticed by the end of the output.
    os.kill(int(left), signal.SIGKILL)
    assert (rest, code) == ("of two words", 0)


def test_a_rank_tells_of_the_signal_that_ended_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logging.getLogger("treegraft"), "handlers", [])

    async def ended() -> list[Any]:
        actor = RankActor("rank", 0, json.dumps(asdict(place_of(Config(), tmp_path / "token"))))
        code = "import time; print('begun'); print('half', end=''); time.sleep(60)"
        found = []
        async for one in actor.run(["-c", code], {}):
            found.append(json.loads(one))
            if found == ["begun\n"]:
                await actor.send(signal.SIGTERM)
        return found

    assert asyncio.run(ended()) == ["begun\n", "half", -signal.SIGTERM]


@contextmanager
def command(tmp_path: Path, *arguments: str) -> Iterator[tuple[int, Iterator[str]]]:
    """Holds `treegraft cluster`: its process, and the lines that it prints."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "treegraft", "cluster", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.pid, iter(process.stdout)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def ranks_in(folder: Path) -> dict[int, int]:
    """The processes of the ranks whose working folder this is, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder.resolve():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                given = dict(
                    one.split(b"=", 1)
                    for one in (entry / "environ").read_bytes().split(b"\0")
                    if b"=" in one
                )
                if words[1:4] == [b"-m", b"treegraft", b"cluster"] and b"RANK" in given:
                    found[int(given[b"RANK"])] = int(entry.name)
        except OSError:
            continue
    return found


def is_over(folder: Path, deadline_s: float) -> bool:
    """Whether no process works in the folder any more within the time."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        working = False
        for entry in Path("/proc").iterdir():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                is_there = entry.name.isdigit() and state != "Z"
                working |= is_there and (entry / "cwd").resolve() == folder.resolve()
            except OSError:
                continue
        if not working:
            return True
        time.sleep(0.5)
    return False


@needs_ray
@pytest.mark.slow
def test_lost_ranks_start_again_and_the_trees_are_those_of_one_process(tmp_path: Path) -> None:
    arguments = ("demo", "run.num_updates=5", *SMALL, *RANKS, "cluster.max_restarts=2")
    with command(tmp_path, *arguments) as (_, lines):
        next(line for line in lines if line.startswith("update 1/"))
        first = ranks_in(tmp_path)
        assert sorted(first) == [0, 1]
        os.kill(first[1], signal.SIGKILL)
        said = next(line for line in lines if "starts again" in line)
        assert "rank 1 was ended by SIGKILL" in said and "restart 1 of at most 2" in said
        next(line for line in lines if re.match("update [34]/", line))
        second = ranks_in(tmp_path)
        assert sorted(second) == [0, 1] and not {*first.values()} & {*second.values()}
        # Rank 0 owns the engines; they end with it.
        os.kill(second[0], signal.SIGKILL)
        said = next(line for line in lines if "starts again" in line)
        assert "rank 0 was ended by SIGKILL" in said and "restart 2 of at most 2" in said
        rest = list(lines)
        assert any(line.startswith("finished run") for line in rest), "".join(rest)
    assert is_over(tmp_path, 30.0)
    config = load_config("demo", ["run.num_updates=5", *SMALL, f"run.dir={tmp_path}"])
    own = config.run.model_copy(update={"name": "alone"})
    train(config.model_copy(update={"run": own}), display=False)
    found = trees_of(tmp_path / "run")
    assert found == trees_of(tmp_path / "alone") and len(found) == 20


@needs_ray
@pytest.mark.slow
def test_a_stopped_job_saves_says_how_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    with command(tmp_path, "demo", "run.num_updates=500", *SMALL, *RANKS) as (pid, lines):
        next(line for line in lines if line.startswith("update 2/"))
        os.kill(pid, signal.SIGTERM)
        said = "".join(lines)
        assert "got SIGTERM; stopping; the ranks save" in said
        assert "interrupted and saved; go on with: treegraft cluster --resume run" in said
        assert is_over(tmp_path, 30.0)
    done = max(part.update for part in parts_in(tmp_path / "run" / "trees", "update"))
    with command(tmp_path, "--resume", "run", f"run.num_updates={done + 1}") as (_, lines):
        assert "finished run" in "".join(lines)


@needs_ray
@pytest.mark.slow
def test_no_process_outlives_a_killed_command(tmp_path: Path) -> None:
    with command(tmp_path, "demo", "run.num_updates=500", *SMALL, *RANKS) as (pid, lines):
        next(line for line in lines if line.startswith("update 1/"))
        os.kill(pid, signal.SIGKILL)
        assert is_over(tmp_path, 90.0)


@needs_ray
@pytest.mark.slow
def test_fewer_ranks_go_on_where_their_machine_is_gone(tmp_path: Path) -> None:
    """Two ranks fill a node of two CPUs; in its place comes one with one CPU."""
    spread = (*RANKS, "cluster.engines=2")
    with three_nodes() as nodes:
        address = f"cluster.address={nodes.cluster.address}"
        arguments = ("demo", "run.num_updates=500", *SMALL, *spread, address)
        with command(tmp_path, *arguments) as (pid, lines):
            next(line for line in lines if line.startswith("update 1/"))
            nodes.remove(ranks_in(tmp_path)[1])
            said = next(line for line in lines if "starts again" in line)
            assert re.search(r"rank [01] was (lost|ended)", said)
            nodes.cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
            assert any("there is room for 1 of 2 ranks; they go on" in line for line in lines)
            # One rank alone, from what two have saved.
            next(line for line in lines if re.match(r"update \d+/", line))
            assert [*ranks_in(tmp_path)] == [0]
            os.kill(pid, signal.SIGTERM)
            assert "interrupted and saved" in "".join(lines)
