"""The warm-up on stored trajectories: what is imitated, the loss, evaluations on the way."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft import session
from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.types import Origin, StepContent, Task, Trace, Tree
from treegraft.evals.evaluate import evaluate
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.sft import demonstration_tree
from treegraft.policy.tiny import build_tiny_model, build_word_tokenizer
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.runs.record import read_metrics
from treegraft.runs.tree_files import write_trees
from treegraft.settings.load import load_config
from treegraft.settings.policy import LearnSettings, LossSettings, WarmupSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.tools.search.encoders import HashingEncoder
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.demonstrations import read_demonstrations
from treegraft.traces.keys import split_steps
from treegraft.train import RunResult, sft, train

WORLD = SearchWorld(load_config(tiny()).tasks.search_world, seed=3, num_train=12, num_eval=4)
TASKS = WORLD.train_tasks()
WORDS = build_word_tokenizer(WORLD.vocabulary())


def traces(
    task: Task, name: str, *, reward: float = 1.0, source: str = "expert", extra: int = 0
) -> list[Trace]:
    """The expert's trajectory, its first step `extra` more times."""
    steps = WORLD.expert(task, 0)
    return split_steps(
        task.id,
        task.question,
        [steps[0]] * extra + list(steps),
        reward=reward,
        source=source,
        trajectory=name,
    )


def buffer_of(path: Path, *trajectories: Sequence[Trace]) -> Path:
    with TraceBuffer(path, HashingEncoder()) as buffer:
        for one in trajectories:
            buffer.add(one)
    return path


def chosen(path: Path, **settings: Any) -> list[tuple[str, int]]:
    """Task and number of steps of the trajectories that are imitated."""
    found = read_demonstrations(path, WarmupSettings(traces=str(path), **settings), TASKS)
    return [(task.id, len(steps)) for task, steps in found.demonstrations]


def test_best_of_each_question_by_reward_then_by_length(tmp_path: Path) -> None:
    first = TASKS[0]
    second = TASKS[1]
    num = {task.id: len(WORLD.expert(task, 0)) for task in (first, second)}
    path = buffer_of(
        tmp_path / "b.sqlite",
        traces(first, "0", reward=0.5),
        traces(first, "1", reward=1.0, extra=2, source="a"),
        traces(first, "2", reward=1.0, extra=1, source="b"),
        traces(second, "0", reward=0.1),
    )
    assert sorted(chosen(path)) == sorted(
        [
            (first.id, num[first.id]),
            (first.id, num[first.id] + 1),
            (first.id, num[first.id] + 2),
            (second.id, num[second.id]),
        ]
    )
    # One of the two with reward 1 has a step less; a question without better ones keeps its own.
    assert chosen(path, num_best=1) == [(first.id, num[first.id] + 1), (second.id, num[second.id])]
    assert chosen(path, num_best=2)[:2] == [
        (first.id, num[first.id] + 1),
        (first.id, num[first.id] + 2),
    ]


def test_a_shared_step_has_the_reward_of_each_trajectory(tmp_path: Path) -> None:
    bad = traces(TASKS[0], "0", reward=0.2)
    good = traces(TASKS[0], "1", reward=0.9)
    wrong = replace(bad[-1], value=StepContent(answer="e0"), reward=0.2)
    path = buffer_of(tmp_path / "b.sqlite", [*bad[:-1], wrong], good)
    with TraceBuffer.open_as_built(path) as buffer:
        kept = [
            [(t.trajectory, t.position, t.reward) for t in one] for one in buffer.trajectories()
        ]
    assert kept == [
        [(name, position, reward) for position in range(len(bad))]
        for name, reward in (("0", 0.2), ("1", 0.9))
    ]
    best = read_demonstrations(path, WarmupSettings(num_best=1, traces="b"), TASKS)
    assert [steps for _, steps in best.demonstrations] == [WORLD.expert(TASKS[0], 0)]


def test_trajectories_that_cannot_be_imitated_are_counted(tmp_path: Path) -> None:
    whole = [traces(task, "0") for task in TASKS[:5]]
    text = replace(whole[1][0], value="searches something")
    stranger = [replace(one, task_id="other/1") for one in whole[3]]
    # The same id, another question: a world of another seed.
    renamed = [replace(one, key=f"who is {one.key}") for one in whole[4]]
    bad = [[text, *whole[1][1:]], whole[2][:-1], whole[0][1:], stranger, renamed]
    for one in bad[2]:
        assert one.position > 0
    parts = (
        "1 with a step that is kept as text alone",
        "1 without an answer at the end",
        "1 with a step missing",
        "2 of other tasks than the recipe's training tasks",
    )
    path = buffer_of(tmp_path / "bad.sqlite", *bad)
    with pytest.raises(DataError) as caught:
        chosen(path)
    assert all(part in str(caught.value) for part in (*parts, "none of its 5 trajectories"))
    buffer_of(path, traces(TASKS[5], "0"))
    found = read_demonstrations(path, WarmupSettings(traces=str(path)), TASKS)
    assert [task for task, _ in found.demonstrations] == [TASKS[5]]
    assert all(part in found.left_out for part in parts)


def test_in_environments_the_question_is_as_it_was_shown(tmp_path: Path) -> None:
    steps = WORLD.expert(TASKS[0], 0)[:-1]
    about = {"source": "s", "trajectory": "a"}
    for question in (TASKS[0].question, "#@  #\n# $ #"):
        first, *rest = split_steps(TASKS[0].id, question, steps, reward=1.0, **about)  # type: ignore[arg-type]
        assert first.key == " ".join(question.split())
        # Buffers of 0.7 hold the key alone.
        for trace, asked in ((first, question), (replace(first, question=""), first.key)):
            path = buffer_of(tmp_path / "b.sqlite", [trace, *rest])
            [found] = read_demonstrations(
                path, WarmupSettings(traces=str(path)), TASKS, has_environment=True
            ).demonstrations
            assert found == (replace(TASKS[0], question=asked), steps)
            path.unlink()


@pytest.mark.parametrize(
    ("rows", "settings", "code"),
    [
        ([{"reward": 0.5}, {}], {"num_best": 1}, "demonstration-without-reward"),
        ([{"reward": float("nan")}], {}, "demonstrations-unfit"),
    ],
)
def test_rewards_of_a_file(
    rows: Sequence[Mapping[str, float]], settings: Any, code: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    own = {"question": "q", "steps": [{"answer": "a"}]}
    path.write_text("".join(json.dumps({**own, **row}) + "\n" for row in rows))
    with raises_code(code):
        chosen(path, **settings)


def test_conversations_of_recorded_trees_are_kept_and_told_apart(tmp_path: Path) -> None:
    def tree(number: int) -> Tree:
        turns = [("user", f"6 * {number} ?"), ("assistant", f"{6 * number}"), ("user", "Doubled ?")]
        messages = tuple({"role": role, "content": text} for role, text in turns)
        task = Task(id=f"t/{number}", question="Doubled ?", reference=(), messages=messages)
        answer = Written(StepContent(answer=str(12 * number)), [((2,), Origin.POLICY)])
        made = tree_of_paths(task, f"1/{number}", [1], [[answer]])
        return replace(made, leaves=(replace(made.leaves[0], reward=1.0),))

    trees = [tree(1), tree(2)]
    write_trees(tmp_path / "trees" / "update-000001", trees)
    for settings in (WarmupSettings(), WarmupSettings(num_best=1)):
        found = read_demonstrations(tmp_path, settings, []).demonstrations
        assert [task.messages for task, _ in found] == [one.task.messages for one in trees]


def test_a_missing_file_is_told_with_the_nearest_one_that_exists(tmp_path: Path) -> None:
    buffer_of(tmp_path / "demos.sqlite", traces(TASKS[0], "a"))
    for name, found in {
        "demo.sqlite": "Did you mean 'demos.sqlite'",
        "elsewhere/demos.sqlite": "folder '.*elsewhere' does not exist",
    }.items():
        with raises_code("import-missing", match=found):
            read_demonstrations(tmp_path / name, WarmupSettings(), TASKS)
        with raises_code("buffer-missing", match=found):
            TraceBuffer.open_as_built(tmp_path / name)


def test_filters_need_stored_trajectories() -> None:
    with raises_code("override-idle"):
        load_config(tiny(), ["warmup.num_best=1"])
    with raises_code("settings-contradict", "buffer.path", "warmup.traces"):
        load_config(tiny(), ["warmup.traces=buffer"])
    # The table has an effect although nothing is grafted.
    load_config(tiny(), ["warmup.traces=buffer", "buffer.path=expert", "buffer.encoder=hashing"])


# ---------------------------------------------------------------------- the loss


@pytest.fixture(scope="module")
def demonstrations() -> list[Tree]:
    form = TagsFormat(WORDS, WORLD.tools(), system_prompt="", require_think=False)
    # Questions of one and two hops, so that demonstrations differ in length.
    return [demonstration_tree(form, task, WORLD.expert(task, 0)) for task in TASKS]


def small_model() -> Any:
    shape = load_config(tiny()).model.tiny
    return build_tiny_model(shape, len(WORDS), eos_id=0, pad_id=0, seed=0)


def gradient_after(trees: Sequence[Tree], max_pack_tokens: int) -> tuple[float, torch.Tensor]:
    """The loss of one step of imitation, and how it moves the weights under plain descent."""
    model = small_model()
    learner = Learner(
        model,
        LearnSettings(max_pack_tokens=max_pack_tokens, max_grad_norm=1e9),
        LossSettings(),
        length_constant=1,
    )
    gradients: list[torch.Tensor] = []

    def keep(lr: float, weight_decay: float | None) -> float:
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
        return 0.0

    learner.optimiser.step = keep  # type: ignore[assignment]
    return learner.imitate(trees, 1e-3), gradients[0]


def test_imitation_is_one_mean_over_the_tokens_of_the_batch(demonstrations: list[Tree]) -> None:
    model = small_model()
    # A slow loop: each demonstration alone, its tokens summed, one division at the end.
    total = torch.zeros(())
    count = 0
    for tree in demonstrations:
        ids = [token for step in tree.steps for token in step.token_ids]
        mask = [carries for step in tree.steps for carries in step.loss_mask]
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for place in range(1, len(ids)):
            if mask[place]:
                total = total - logprobs[place - 1, ids[place]]
                count = count + 1
    (total / count).backward()
    expected = torch.cat([one.grad.flatten() for one in model.parameters()])
    # One pass, several, and one for each demonstration.
    for limit in (8192, 120, 1):
        loss, gradient = gradient_after(demonstrations, limit)
        assert loss == pytest.approx(total.item() / count, abs=1e-5)
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5


# ---------------------------------------------------------------------- whole runs


def run_of(
    folder: Path, name: str, function: Any = train, **tables: Mapping[str, Any]
) -> RunResult:
    own = {"name": name, "dir": str(folder), "num_updates": 1}
    found: RunResult = function(
        tiny(**{"eval": {"num_samples": 0}, **tables, "run": own}), display=False
    )
    return found


WARMUP: Mapping[str, Any] = {"decision_frac": 0.0, "num_steps": 6, "eval_every": 4}


def test_a_buffer_is_imitated_then_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    async def counted(parts: Any, tasks: Any, number: int, **options: Any) -> Any:
        numbers.append(number)
        return await evaluate(parts, tasks, number, **options)

    monkeypatch.setattr(session, "evaluate", counted)
    warmup = {**WARMUP, "traces": "buffer"}
    buffer = {"path": "expert", "encoder": "hashing"}
    done = run_of(tmp_path, "both", warmup=warmup, buffer=buffer)
    assert (done.run_dir / "buffer" / "traces.sqlite").is_file()
    lines = read_metrics(done.run_dir)
    assert [line["update"] for line in lines] == [0, 1]
    assert "learn/loss" in lines[1] and "retrieve/num_asked" not in lines[1]
    # Before the first step, after four, and at the end; costs add up.
    found = read_metrics(done.run_dir, "warmup.jsonl")
    assert [line["warmup/num_steps"] for line in found[1:]] == [4, 6]
    assert all("eval/accuracy" in line for line in found)
    assert "warmup/num_steps" not in found[0] and len(found) == 3
    # That at the end of the warm-up is equal to that before the first update.
    assert numbers == [0, 0, 0, 0, 1]
    assert {key: value for key, value in found[2].items() if key.startswith("eval/")} == {
        key: value for key, value in lines[0].items() if key.startswith("eval/")
    }
    tokens = [line["warmup/num_loss_tokens"] for line in found[1:]]
    assert 0 < tokens[0] < tokens[1] == lines[0]["warmup/num_loss_tokens"]
    assert lines[0]["warmup/num_steps"] == 6
    # The same buffer as a file, without its encoder: the same warm-up.
    again = run_of(
        tmp_path,
        "file",
        sft,
        warmup={**warmup, "traces": str(done.run_dir / "buffer" / "traces.sqlite")},
    )
    assert again.metrics["warmup/loss"] == lines[0]["warmup/loss"]


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Has the warm-up fail at its step `step`, from 1."""
    steps = 0
    imitate = Learner.imitate

    def stopped(self: Learner, trees: Sequence[Tree], *rest: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == step:
            raise CheckpointError("killed")
        return imitate(self, trees, *rest)

    patch.setattr(Learner, "imitate", stopped)


def test_law_16_demonstrations_do_not_change_unseen(tmp_path: Path) -> None:
    """A .jsonl of conversations in [buffer] is imported for the warm-up alone; its copy is what a
    resume depends on."""

    def row(task: Task, number: int) -> dict[str, Any]:
        steps = [
            {
                "thought": one.thought,
                "calls": [{"name": call.name, "body": call.body} for call in one.calls],
                "observations": [seen.text for seen in one.observations],
                "answer": one.answer,
            }
            for one in WORLD.expert(task, 0)
        ]
        ids = {"task_id": task.id, "question": task.question, "source": "chats"}
        return {**ids, "trajectory": str(number), "reward": 1.0, "steps": steps}

    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row(one, n)) + "\n" for n, one in enumerate(TASKS)))
    tables = {
        "warmup": {**WARMUP, "eval_every": 0, "traces": "buffer"},
        "buffer": {"path": str(path), "encoder": "hashing"},
    }
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="killed"):
        stop_at(4, patch)
        run_of(tmp_path, "a", sft, **tables)
    run = tmp_path / "a"
    with sqlite3.connect(run / "buffer" / "traces.sqlite") as connection:
        connection.execute(
            """UPDATE traces SET value = replace(value, '"body":"e1', '"body":"e2')"""
        )
    connection.close()
    with raises_code("inputs-changed"):
        sft(None, resume=run, display=False)
    assert sft(None, resume=run, accepts_changes=True, display=False).metrics["warmup/num_steps"]


def test_an_interrupted_warmup_keeps_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmup = {**WARMUP, "num_steps": 8, "eval_every": 2}
    whole = run_of(tmp_path, "whole", sft, warmup=warmup)
    expected = read_metrics(whole.run_dir, "warmup.jsonl")
    assert [line["warmup/num_steps"] for line in expected[1:]] == [2, 4, 6, 8]
    stop_at(8, monkeypatch)
    with pytest.raises(CheckpointError, match="killed"):
        run_of(tmp_path, "cut", sft, warmup=warmup)
    place = tmp_path / "cut"
    # The last checkpoint is that of step 6; what came later, and a line cut short, comes again.
    with (place / "warmup.jsonl").open("a") as file:
        file.write('{"update": 0, "warmup/num_steps": 7}\n{"upd')
    done = sft(None, resume=place, display=False)

    def told(lines: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        return [{key: one[key] for key in one if not key.startswith("time/")} for one in lines]

    assert told(read_metrics(place, "warmup.jsonl")) == told(expected)
    assert done.metrics["warmup/loss"] == whole.metrics["warmup/loss"]
