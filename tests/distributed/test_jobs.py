"""`torchrun -m treegraft train`: one rank after another is started, killed, stopped."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cluster.worlds import LONGEST
from tests.distributed.jobs import DEADLINE_S, children, ranks_of, torchrun
from tests.support.fake_vllm import fakes
from transformers import AutoModelForCausalLM

from treegraft import RunResult, train
from treegraft.core.types import BranchCause
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config

SMALL = (
    "warmup.num_steps=6",
    "tasks.num_train=40",
    "tasks.num_eval=4",
    "eval.every=0",
    "run.tasks_per_update=4",
    "explore.num_leaves=4",
    "learn.max_pack_tokens=400",
    "checkpoint.every=1",
    "run.name=run",
    "run.dir=.",
)


@contextmanager
def job(tmp_path: Path, *arguments: str) -> Iterator[tuple[int, list[int], Iterator[str]]]:
    """Holds a job of two ranks: torchrun's process, the ranks', the lines that it prints."""
    process = torchrun(2, "-m", "treegraft", "train", *arguments, cwd=tmp_path)
    assert process.stdout is not None
    deadline = time.monotonic() + DEADLINE_S
    ranks: list[int] = []
    try:
        while len(ranks) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
            ranks = children(process.pid)
        yield process.pid, ranks, iter(process.stdout)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def updates(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["update"] for line in lines]


@pytest.mark.smoke
def test_a_killed_rank_ends_the_job_and_fewer_ranks_go_on(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (_, ranks, lines):
        next(line for line in lines if line.startswith("update 2/"))
        began = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        error = next(line for line in lines if line.startswith("error: "))
        list(lines)
        assert time.monotonic() - began < 15.0
        said = rf"rank 1 \(\S+, process {ranks[1]}\) has ended: no last words"
        assert re.search(said, error) and "--resume" in error
        deadline = time.monotonic() + 10.0
        while any(map(is_alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    done = max(updates(tmp_path / "run"))
    settings = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    settings["run"]["num_updates"] = done + 1
    result = train(settings, resume=tmp_path / "run", display=False)
    assert result.metrics["policy_version"] == done + 1
    assert updates(tmp_path / "run") == list(range(done + 2))


@pytest.mark.slow
def test_a_rank_that_is_killed_during_a_rollout_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the launcher's signal tells rank 0 of it: every search takes long.
    monkeypatch.setenv(LONGEST, "500")
    tasks = "tasks.kind=tests.cluster.worlds:SlowWorld"
    settings = ("warmup.num_steps=30", *SMALL[1:], "eval.at_start=false", tasks)
    with job(tmp_path, "demo", *settings) as (_, ranks, lines):
        checkpoints = tmp_path / "run" / "checkpoints"
        deadline = time.monotonic() + DEADLINE_S
        while not any(checkpoints.glob("update-*")):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(1.0)
        os.kill(ranks[1], signal.SIGKILL)
        said = "".join(lines)
    assert "interrupted and saved" in said and "update 1/" not in said
    assert f"error: rank 1 ({socket.gethostname()}, process {ranks[1]}) has ended" in said


@pytest.mark.slow
def test_a_stopped_job_saves_and_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (launcher, ranks, lines):
        next(line for line in lines if line.startswith("update 2/"))
        os.kill(launcher, signal.SIGTERM)
        said = "".join(lines)
        assert "got SIGTERM; stopping and saving" in said and "interrupted and saved" in said
    assert not any(map(is_alive, ranks))
    done = max(updates(tmp_path / "run"))
    again = ("--resume", "run", f"run.num_updates={done + 2}")
    with job(tmp_path, *again) as (_, _, lines):
        assert "finished run" in "".join(lines)
    assert updates(tmp_path / "run") == list(range(done + 3))


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with job(tmp_path, "demo", "run.num_updates=500", *SMALL) as (launcher, ranks, lines):
        next(line for line in lines if line.startswith("update 1/"))
        os.kill(launcher, signal.SIGKILL)
        deadline = time.monotonic() + 15.0
        while any(map(is_alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_ranks_with_another_recipe_are_refused(tmp_path: Path) -> None:
    codes, said = ranks_of(2, "tests.distributed.laws", str(tmp_path), "unlike")
    assert 0 not in codes
    differs = r"rank 1 on \S+: its settings differ .*learn.lr was 0.01, now 0.5 there"
    assert re.search(differs, "".join(said))


def trees_of(run_dir: Path) -> list[Any]:
    """Each tree's steps: place, tokens, cause; its rewards."""
    return [
        (
            [(step.id, step.token_ids.tolist(), type(step.cause)) for step in tree.steps],
            [leaf.reward for leaf in tree.leaves],
        )
        for tree in read_trees(run_dir)
    ]


@pytest.mark.slow
def test_ranks_that_sample_on_a_server_grow_the_trees_of_one_process(tmp_path: Path) -> None:
    """Two ranks, and a server of ours that answers as vLLM does; the same updates by one process
    and that server."""
    overrides = (
        "run.num_updates=2",
        "run.tasks_per_update=3",
        "warmup.num_steps=150",
        "eval.every=0",
        "tasks.num_train=40",
        "tasks.num_eval=4",
        "explore.num_leaves=4",
        "explore.explorers=['entropy']",
        "explore.entropy.num_starts=2",
        "rollout.max_completion_tokens=40",
        "tasks.search_world.hops=[1,2]",
        "eval.at_start=false",
        "eval.at_end=false",
    )
    own = (f"run.dir={tmp_path}", "run.name=shape", "run.num_updates=0")
    result = train(load_config("demo", [*own, *overrides[1:]]), display=False)
    # Of its shape alone something is used: a run publishes its weights first.
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint_dir)
    with fakes(model.eval(), max_context=256) as (server,):
        served = ("engine.kind=vllm", f"engine.vllm.servers=['{server.url}']")
        own = (f"run.dir={tmp_path}", "run.name=alone")
        train(load_config("demo", [*overrides, *served, *own]), display=False)
        server.num_loads = 0
        with job(tmp_path, "demo", *overrides, *served, "run.dir=.", "run.name=run") as job_:
            said = "".join(job_[2])
    assert "finished run" in said, said
    # Before the run, after the warm-up, after each update.
    assert server.num_loads == 4
    found = trees_of(tmp_path / "run")
    assert found == trees_of(tmp_path / "alone") and len(found) == 6
    assert any(kind is BranchCause for steps, _ in found for _, _, kind in steps)
    for mine, other in zip(*map(read_metrics, (tmp_path / "run", tmp_path / "alone")), strict=True):
        expected = pytest.approx(other.get("learn/grad_norm", 0.0), rel=1e-4)
        assert mine.get("learn/grad_norm", 0.0) == expected
        assert mine.get("learn/engine_gap", 0.0) < 1e-4


SCRIPT = """
import json, sys
from tests.support.tiny import tiny
from treegraft import RunResult, train
from treegraft.parts import losses
from treegraft.policy.tiny import build_tiny_model, build_word_tokenizer
from treegraft.settings.policy import TinySettings

rows = [{"question": f"{a} + {b} ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
words = {word for row in rows for text in row.values() for word in text.split()}
tokenizer = build_word_tokenizer(sorted(words))
shape = TinySettings(hidden_size=32, num_layers=1, num_heads=2)
ends = tokenizer.eos_token_id, tokenizer.pad_token_id
model = build_tiny_model(shape, len(tokenizer), *ends, 0)
scale = 2.0
calls = []


def objective(settings, new, old, advantages, *, owners, shaping):
    calls.append(len(new))
    return losses.clipped_surrogate(new, old, scale * advantages, clip_low=0.2, clip_high=0.2)


settings = tiny(
    run={"dir": sys.argv[1], "name": "a"},
    learn={"max_pack_tokens": 64},
    rollout={"max_completion_tokens": 16, "max_tool_calls": 0},
    warmup={"num_steps": 0},
    eval={"every": 0, "at_start": False, "at_end": False},
)
del settings["model"], settings["tasks"], settings["reward"]
result = train(
    settings,
    model=(model, tokenizer),
    tasks=rows,
    rewards=lambda completions, **_: [1 / (1 + len(one)) for one in completions],
    objective=objective,
    display=False,
)
# The trial before the run is one call.
print(json.dumps([len(calls) > 1, result.metrics["learn/grad_norm"]]))
"""


@pytest.mark.slow
def test_ranks_learn_a_given_model_by_a_given_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank runs the script, so its closures and its model need not travel."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "one")])
    runpy.run_path(str(script), run_name="__main__")
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    process = torchrun(2, str(script), str(tmp_path / "two"))
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    both = [json.loads(line) for line in re.findall(r"^\[.*\]$", output, re.M)]
    # Each rank has used its own objective, and has the whole run's metrics.
    assert [calls for calls, _ in (alone, *both)] == [True, True, True]
    assert [norm for _, norm in both] == pytest.approx([alone[1]] * 2, rel=1e-5)
    one, two = (
        AutoModelForCausalLM.from_pretrained(RunResult.read(tmp_path / place / "a").checkpoint_dir)
        for place in ("one", "two")
    )
    for name, weights in two.state_dict().items():
        assert torch.allclose(one.state_dict()[name], weights, atol=1e-6), name
