"""Run folders for tests of the viewer: written with the record's own functions, small, with
everything a page can show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import uvicorn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from treegraft.core.columns import Column
from treegraft.core.listener import address_of, listen
from treegraft.core.types import (
    BranchCause,
    BranchDecision,
    Cause,
    ContinuationCause,
    GraftCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
)
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import parts_in, write_trees
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app

WORDS = [
    "<pad>",
    "<eos>",
    "?",
    "search",
    "e1",
    "e2",
    "e3",
    "r1",
    "r2",
    "is",
    "answer",
    "of",
    "<search>",
    "</search>",
]
EXPERT_CALL = StepContent(
    calls=(ToolCall("search", "e2 r2"),), observations=(Observation(text="r2 of e2 is e3"),)
)

_P = Origin.PROMPT
_S = Origin.POLICY
_T = Origin.TOOL
_R = Origin.RETRIEVED


def step(
    step_id: str,
    marks: str,
    content: StepContent,
    cause: Cause | None,
    *,
    ids: int = 0,
    learned: bool = True,
) -> Step:
    """Returns a step of tokens of these origins (p, s, t, r); sampled ones have entropies 0.1, 0.2,
    ... and ratios 1.1, 1.2, ..."""
    origins = tuple({"p": _P, "s": _S, "t": _T, "r": _R}[mark] for mark in marks)
    numbers = [origins[: n + 1].count(_S) for n in range(len(origins))]
    is_sampled = [origin is _S for origin in origins]

    def column(scale: float, base: float, filler: float) -> Column:
        pairs = zip(numbers, is_sampled, strict=True)
        return np.array([base + scale * n if is_own else filler for n, is_own in pairs])

    return Step(
        id=step_id,
        parent=step_id.rpartition(".")[0] or None,
        depth=step_id.count("."),
        token_ids=np.array([2 + (ids + n) % (len(WORDS) - 2) for n in range(len(origins))]),
        origins=np.array(origins),
        loss_mask=np.array(is_sampled),
        sampling_logprobs=column(-0.1, 0.0, 0.0),
        entropies=column(0.1, 0.0, 0.0),
        old_logprobs=column(-0.1, 0.0, 0.0) if learned else None,
        ratios=column(0.1, 1.0, 1.0) if learned else None,
        content=content,
        stop_reason=StopReason.STOP if any(is_sampled) else None,
        policy_version=3,
        cause=cause,
    )


def grown_tree(
    update: int,
    task: str,
    *,
    question: str = "r2 of r1 of e1 ?",
    answer: str = "e3",
    note: str = "",
) -> Tree:
    """Returns a tree of four leaves: a right one after a graft, a wrong one, a branch beside it, a
    truncated start."""
    graft = GraftCause(source="expert", task_id="t/9", reward=1.0, similarity=0.875)
    branch = BranchCause(entropy_change=0.25, probability=0.625, rule="threshold")
    refused = BranchDecision(
        seen=BranchCause(entropy_change=-0.125, probability=0.475, rule="threshold", bar=0.5),
        num_wanted=0,
    )
    search = StepContent(
        thought=note,
        calls=(ToolCall("search", "e1 r1"),),
        observations=(Observation(text="r1 of e1 is e2"),),
    )
    failed = StepContent(
        calls=(ToolCall("search", "nonsense"),),
        observations=(Observation(text="no such entity", is_error=True),),
    )
    steps = (
        step("0", "pppp", StepContent(thought=question), None),
        step("0.0", "ssstt", search, StartCause(), ids=1),
        step("0.0.0", "rrrr", EXPERT_CALL, graft, ids=2),
        step("0.0.0.0", "ss", StepContent(answer=answer), ContinuationCause(), ids=3),
        step("0.0.1", "sss", StepContent(answer="e2"), branch, ids=4),
        step("0.1", "ssstt", search, StartCause(), ids=1),
        replace(step("0.1.0", "sstt", failed, ContinuationCause(), ids=6), decision=refused),
        step("0.1.0.0", "s", StepContent(answer="e1"), ContinuationCause(), ids=7),
        step("0.2", "ssssssss", StepContent(thought="on and on"), StartCause(), ids=8),
    )
    leaf_parts = (
        ("0.0.0.0", 1.0, 1.5),
        ("0.0.1", 0.0, -0.5),
        ("0.1.0.0", 0.0, -0.5),
        ("0.2", 0.0, -0.5),
    )
    leaves = tuple(
        Leaf(
            step_id=step_id,
            status=Status.TRUNCATED if step_id == "0.2" else Status.COMPLETED,
            reward=reward,
            reward_parts={"exact_match": reward},
            answer=None
            if step_id == "0.2"
            else {"0.0.0.0": answer, "0.0.1": "e2"}.get(step_id, "e1"),
            is_correct=reward == 1.0,
            weight=0.25,
            advantage=advantage,
            outcome_advantage=advantage,
            retrieved_frac=4 / 11 if step_id == "0.0.0.0" else 0.0,
            shaping_factor=1.0182 if step_id == "0.0.0.0" else 1.0,
        )
        for step_id, reward, advantage in leaf_parts
    )
    return Tree(
        task=Task(id=task, question=question, reference=("e3",), category="2 hops"),
        group_id=f"{update}/{task}",
        steps=steps,
        leaves=leaves,
    )


def plain_tree(update: int, task: str) -> Tree:
    """Returns a tree of one leaf without reward, graft or branch."""
    steps = (
        step("0", "pp", StepContent(thought="why ?"), None),
        step("0.0", "ss", StepContent(answer="because"), StartCause()),
    )
    leaf = Leaf(step_id="0.0", status=Status.FAILED, error="the search service is down")
    return Tree(
        task=Task(id=task, question="why ?", reference=()),
        group_id=f"{update}/{task}",
        steps=steps,
        leaves=(leaf,),
    )


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of `WORDS` where a checkpoint has it."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def metrics_of(update: int) -> dict[str, float]:
    """Returns a line of metrics; the third update lost a trajectory."""
    metrics = {
        "reward/mean": 0.1 * update,
        "learn/entropy": 1.0 / (update + 1),
        "rollout/tool_calls_mean": 1.5,
        "time/update_s": 3.0,
    }
    metrics |= {
        "time/rollout_s": 2.0,
        "time/learn_s": 0.5,
        "rollout/failed_frac": 0.25 if update == 3 else 0.0,
    }
    metrics |= {"health/failed": 0.25} if update == 3 else {}
    metrics |= {
        "branch/num_branches": 1.0,
        "rollout/num_trajectories": 4.0,
        "graft/hybrid_frac": 0.25,
    }
    return metrics | ({"eval/accuracy": 0.5} if update % 2 == 0 else {})


def as_lines(run: Path) -> Path:
    """Rewrites the trees of a run as 0.7 kept them, a file of lines for each update; returns the
    first update's."""
    for part in parts_in(run / "trees"):
        lines = b"".join(line for _, line in part.lines())
        (run / "trees" / f"{part.name}.jsonl").write_bytes(lines)
        part.path.unlink()
    return run / "trees" / "update-000001.jsonl"


def repeat_update(run: Path, num_updates: int) -> None:
    """Writes the trees of a run's first update as those of 2 to `num_updates` too."""
    (part,) = parts_in(run / "trees", "update")
    data = part.data()
    for number in range(2, num_updates + 1):
        part.path.with_name(f"update-{number:06d}.jsonl.zst").write_bytes(data)


def write_run(path: Path, *, num_updates: int = 4, total: int = 10, note: str = "") -> Path:
    """Returns a run folder with so many of its updates done."""
    folder = RunFolder.create(
        path, json.dumps({"run": {"num_updates": total}, "tasks": {"num_eval": 40}})
    )
    for update in range(num_updates + 1):
        folder.append_metrics(update, metrics_of(update))
        if update:
            write_update(path, update, note=note)
    write_trees(folder.trees_path(2, "greedy"), [grown_tree(2, "held/1")])
    write_tokenizer(path / "checkpoints" / "best")
    return path


def write_update(path: Path, update: int, *, note: str = "") -> None:
    """Writes the trees of an update."""
    trees = [grown_tree(update, "t/1", note=note), plain_tree(update, f"t/{100 + update}")]
    write_trees(RunFolder(path).trees_path(update), trees)


@contextmanager
def served(*paths: Path) -> Iterator[str]:
    """Gives the address of a viewer of these runs."""
    made = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        build_app(open_runs(list(paths)), token="a-token"),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [made]}, daemon=True)
    thread.start()
    try:
        yield f"{address_of(made)}a-token/"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        made.close()


def copy_without_checkpoints(run: Path, target: Path) -> Path:
    """Returns a copy as someone might hand it on."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints"))
    return target
