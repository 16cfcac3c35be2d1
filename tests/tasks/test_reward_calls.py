"""What reward functions receive: all that the agent wrote, the columns as they stand, and TRL's and
verl's own functions unchanged."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_format_chat import TOOLS, ends_of, tokenizer_of
from tests.support.error_codes import raises_code

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Format
from treegraft.core.types import Origin, Status, StepContent, Task, ToolCall, Tree
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.settings.tasks import RewardSettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tasks.rewards import RewardScorer, build_rewards, check_rewards
from treegraft.tools.toolbox import Toolbox

END = "<|im_end|>"
MESSAGES = (
    {"role": "system", "content": "You teach sums."},
    {"role": "user", "content": "What is 6 * 7?"},
)
ROW = {"question": "What is 6 * 7?", "solution": 42, "tags": ["sum", "easy"]}
TASK = Task(id="sums/0", question="What is 6 * 7?", reference=("42",), columns=ROW)
CHAT_TASK = replace(TASK, messages=MESSAGES)
SAID = {
    "tags": (
        "<think>look</think><search> e1 </search>",
        "<think>so</think><answer>\\boxed{42}</answer>",
    ),
    "chat": (
        'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "e1"}}\n</tool_call>',
        "It is \\boxed{42}",
    ),
}
KINDS = pytest.mark.parametrize("kind", list(SAID))


@functools.cache
def form_of(kind: str) -> Format:
    tokenizer = tokenizer_of("qwen25")
    ends = ends_of("qwen25")
    if kind == "tags":
        return TagsFormat(tokenizer, TOOLS, end_ids=ends)
    return ChatFormat(tokenizer, TOOLS, end_ids=ends, require_think=False, require_boxed=False)


def grow(
    kind: str,
    replies: Sequence[str],
    function: Callable[..., Any],
    task: Task = TASK,
    **limits: int,
) -> Tree:
    """One trajectory that writes the replies, scored by the function; `mine` has to have worked."""
    form = form_of(kind)
    written = [f"{reply}{END}" if kind == "chat" else reply for reply in replies]
    fields = {"num_leaves": 1, "temperature": 1.0, "max_completion_tokens": 300}
    fields |= {"max_agent_steps": 4, "max_tool_calls": 4, "deadline_s": 20.0, **limits}
    options = {"deadline_s": 5.0, "max_output_chars": 200, "cache": False, "max_concurrent": 8}
    grower = Grower(
        ScriptedEngine(written, tokenizer_of("qwen25")),
        form,
        Toolbox(TOOLS, ToolsSettings(**options)),
        Independent(),
        Limits(**fields),
        RewardScorer([("mine", function, 1.0)], written_text=form.written_text),
    )
    tree = asyncio.run(grower.grow(task, noise_key=(0, "train", 1), group_id="g"))
    assert [leaf.error for leaf in tree.leaves] == [None]
    return tree


def seen_by(kind: str, replies: Sequence[str], task: Task = TASK, **limits: int) -> Any:
    """The arguments of a reward function, and the trajectory."""
    seen: dict[str, Any] = {}

    def mine(**columns: Any) -> list[float]:
        seen.update(columns)
        return [1.0]

    return seen, grow(kind, replies, mine, task, **limits).trajectories()[0]


@KINDS
def test_a_completion_is_all_that_the_agent_wrote(kind: str) -> None:
    seen, path = seen_by(kind, SAID[kind])
    assert (
        path.status is Status.COMPLETED and "about e1" in path.steps[1].content.observations[0].text
    )
    assert seen["completions"] == ["\n".join(SAID[kind])]
    own = [t for t, is_own in zip(path.token_ids, path.sampled_mask, strict=True) if is_own]
    assert seen["completion_ids"] == [own] != [path.completion_ids]
    decoded = tokenizer_of("qwen25").decode(own, skip_special_tokens=True)
    assert decoded == "".join(SAID[kind])


def test_grafted_steps_are_not_the_agents() -> None:
    seen, path = seen_by("tags", SAID["tags"])
    form, (root, first, last) = form_of("tags"), path.steps
    ids = form.render_graft([StepContent(calls=(ToolCall("search", "e2"),))])
    graft = replace(
        first,
        id="0.0",
        token_ids=ids,
        **{name: (0.0,) * len(ids) for name in ("sampling_logprobs", "entropies")},
        origins=(Origin.RETRIEVED,) * len(ids),
        loss_mask=(False,) * len(ids),
    )
    own = replace(first, id="0.0.0", parent="0.0")
    end = replace(last, id="0.0.0.0", parent="0.0.0")
    leaf = replace(path.leaf, step_id=end.id)
    tree = Tree(task=TASK, group_id="g", steps=(root, graft, own, end), leaves=(leaf,))
    again: dict[str, Any] = {}

    def mine(**columns: Any) -> list[float]:
        again.update(columns)
        return [1.0]

    scorer = RewardScorer([("mine", mine, 1.0)], written_text=form.written_text)
    asyncio.run(scorer(tree))
    assert again["completions"] == seen["completions"]
    assert again["completion_ids"] == seen["completion_ids"]
    assert graft.token_ids[0] in again["trajectories"][0].completion_ids


def test_columns_arrive_as_they_stand() -> None:
    seen, _ = seen_by("chat", SAID["chat"])
    assert set(seen) == {
        "prompts",
        "completions",
        "completion_ids",
        "trajectories",
        "reference",
        "question",
        "solution",
        "tags",
    }
    assert (seen["solution"], seen["tags"]) == ([42], [["sum", "easy"]])
    assert seen["question"] == seen["prompts"] == ["What is 6 * 7?"]
    assert seen["reference"] == [("42",)]
    # A column of that name is the file's.
    own = replace(TASK, columns={"reference": 42, "completions": "theirs"})
    seen, _ = seen_by("chat", SAID["chat"], own)
    assert seen["reference"] == [42]
    assert seen["completions"] == ["\n".join(SAID["chat"])]


def test_tasks_that_came_as_messages_give_messages() -> None:
    seen, _ = seen_by("chat", SAID["chat"], CHAT_TASK)
    assert seen["prompts"] == [list(MESSAGES)]
    function = {"name": "search", "arguments": "e1"}
    assert seen["completions"] == [
        [
            {
                "role": "assistant",
                "content": SAID["chat"][0],
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "name": "search", "content": "about e1"},
            {"role": "assistant", "content": SAID["chat"][1]},
        ]
    ]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    seen, _ = seen_by("chat", [call, "3"], CHAT_TASK)
    assert seen["completions"][0][0]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}


# ---------------------------------------------------------------------- functions of TRL and verl


VERL_ROW = {
    "data_source": "sums",
    "prompt": list(MESSAGES),
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """verl's signature."""
    assert (data_source, extra_info["index"]) == ("sums", 7)
    assert isinstance(solution_str, str) and extra_info["num_turns"] == 2
    return 1.0 if f"\\boxed{{{ground_truth}}}" in solution_str else 0.0


def with_details(solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    assert {"data_source", "extra_info"} <= kwargs.keys()
    return {"score": float(ground_truth in solution_str), "acc": True}


async def awaited(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    await asyncio.sleep(0)
    return compute_score(data_source, solution_str, ground_truth, extra_info)


@pytest.mark.parametrize("function", [compute_score, with_details, awaited])
def test_functions_of_verls_signature(function: Any) -> None:
    for task in (replace(CHAT_TASK, columns=VERL_ROW), replace(TASK, columns=VERL_ROW)):
        check_rewards([("verl", function, 1.0)], [task])
        for answer, reward in (("It is \\boxed{42}", 1.0), ("It is \\boxed{41}", 0.0)):
            tree = grow("chat", [answer], function, task)
            assert tree.leaves[0].reward_parts == {"mine": reward}


def test_without_verls_layout_the_reference_is_the_ground_truth() -> None:
    truths: list[Any] = []

    def mine(solution_str: str, ground_truth: Any) -> float:
        truths.append(ground_truth)
        return 0.0

    grow("chat", ["42"], mine, replace(TASK, columns={}))
    grow("chat", ["42"], mine, replace(TASK, columns={}, reference=("42", "forty-two")))
    grow("chat", ["42"], mine, replace(TASK, columns={"ground_truth": 42}))
    both = {"reward_model": {"ground_truth": "theirs"}, "ground_truth": 42}
    grow("chat", ["42"], mine, replace(TASK, columns=both))
    assert truths == ["42", ["42", "forty-two"], 42, "theirs"]


def of_trl(function: str, completions: Any, columns: dict[str, Any]) -> list[float]:
    """Calls a function of TRL's in the environment that TREEGRAFT_TRL_PYTHON names."""
    code = (
        "import json, sys; import trl.rewards; given = json.load(sys.stdin);"
        f"print('=', json.dumps(trl.rewards.{function}(**given)))"
    )
    done = subprocess.run(
        [os.environ["TREEGRAFT_TRL_PYTHON"], "-c", code],
        input=json.dumps({"completions": completions, **columns}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout.rpartition("= ")[2])
    return found


@pytest.mark.skipif(
    not os.environ.get("TREEGRAFT_TRL_PYTHON"),
    reason="TREEGRAFT_TRL_PYTHON names no Python of an environment with trl",
)
def test_trls_own_accuracy_reward() -> None:
    """Unchanged, on what our scorer gives it, everything but token ids and trajectories."""
    task = replace(CHAT_TASK, columns={"prompt": list(MESSAGES), "solution": "$42$"})

    def accuracy(completions: Any, solution: Any, **columns: Any) -> list[float]:
        left = {name: columns[name] for name in ("prompts", "completion_ids", "reference")}
        return of_trl("accuracy_reward", completions, {"solution": solution, **left})

    for answer, reward in (("It is \\boxed{42}", 1.0), ("It is \\boxed{41}", 0.0)):
        tree = grow("chat", [answer], accuracy, task, deadline_s=60)
        assert tree.leaves[0].reward_parts == {"mine": reward}


# ---------------------------------------------------------------------- refused before a run


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("builtins:eval", "reward-signature"),
        ("builtins:len", "reward-signature"),
        ("builtins:max", "reward-signature"),
        ("os:getcwd", "reward-signature"),
        ("os:sep", "reward-signature"),
    ],
)
def test_what_cannot_be_called_is_refused(name: str, code: str) -> None:
    with raises_code(code):
        build_rewards(RewardSettings(funcs=[name]))


def test_an_argument_without_a_column_is_refused_with_the_columns() -> None:
    def mine(completions: Any, solutions: Any, other: Any = None) -> list[float]:
        return [0.0]

    with pytest.raises(SettingError) as refusal:
        check_rewards([("my:mine", mine, 1.0)], [TASK])
    for part in ("'my:mine'", "'solutions'", "'sums/0'", "question, solution, tags", "'solution'?"):
        assert part in str(refusal.value)

    def of_trainer(completions: Any, trainer_state: Any) -> list[float]:
        return [0.0]

    with raises_code("reward-column-missing"):
        check_rewards([("my:mine", of_trainer, 1.0)], [TASK])
    # verl's needs the columns that it has no default for.
    with raises_code("reward-column-missing"):
        check_rewards([("verl", compute_score, 1.0)], [TASK])
    # A later row may lack what the first has.

    def of_all(completions: Any, solution: Any, **_: Any) -> list[float]:
        return [0.0]

    with raises_code("reward-column-missing"):
        check_rewards([("trl", of_all, 1.0)], [TASK, replace(TASK, id="sums/1", columns={})])


@pytest.mark.parametrize(
    ("func", "code"),
    [
        ("builtins:eval", "reward-signature"),
        ("tests.tasks.test_reward_calls:compute_score", "reward-column-missing"),
    ],
)
def test_a_run_that_could_not_be_scored_leaves_no_folder(
    func: str, code: str, tmp_path: Path
) -> None:
    from tests.support.tiny import tiny

    from treegraft.train import train

    with raises_code(code):
        train(tiny(run={"dir": str(tmp_path / "runs")}, reward={"funcs": [func]}))
    assert not (tmp_path / "runs").exists()
