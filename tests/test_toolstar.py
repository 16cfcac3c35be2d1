"""recipes/toolstar.toml from end to end: real questions, both tools, a scripted agent, a tiny
random model that learns.

Every prompt, call, result, reward, mask and record is compared with what it has to be by the
recipe, not with what was written.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import toolstar_agent
from tests.support.corpus import DATA, ROOT, write_corpus
from tests.support.smollm2 import smollm2
from tests.support.toolstar_agent import HABITS, search_of

from treegraft.core.types import Origin, Status, StopReason, Trajectory, Tree
from treegraft.rollout.formats.markup import clean
from treegraft.runs.record import read_trees
from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks

pytestmark = pytest.mark.smoke

RECIPE = ROOT / "recipes" / "toolstar.toml"

ALMOST = {
    "American": 2 / 3,  # "American zzz": precision 1/2, recall 1
    "September 21, 1890": 6 / 7,
    'Vilyam "Willie" Genrikhovich Fisher': 8 / 9,
    "(5, 2, -1)": 0.0,  # mathematics is equal or not
}
"""What the reference with one word too many earns, by the references of the first two updates of
two tasks with seed 6."""


class Watcher:
    """A display that keeps the sample trees as they were in memory."""

    def __init__(self) -> None:
        self.trees: list[Tree] = []

    def sample(self, tree: Tree) -> None:
        """Keeps it."""
        self.trees.append(tree)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any, Watcher]:
    """Run folder, corpus, tokenizer and display of two updates of the recipe."""
    if not (DATA / "rl" / "train_10k.parquet").exists():
        pytest.skip(f"the papers' questions are not in {DATA}; set TREEGRAFT_DATA")
    smollm2()  # skips where there is none
    from treegraft.train import train

    folder = tmp_path_factory.mktemp("toolstar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEGRAFT_DATA", str(DATA))
        patch.setenv("TREEGRAFT_CORPUS", str(write_corpus(folder / "corpus.jsonl")))
        patch.chdir(ROOT)
        tokenizer = save_tiny_model(folder / "model")
        changes = {
            "model.path": folder / "model",
            "engine.kind": "tests.support.toolstar_agent:make",
            "run.dir": folder,
            "run.name": "run",
            "run.seed": 6,
            "run.num_updates": 2,
            "run.tasks_per_update": 2,
            "explore.num_leaves": len(HABITS),
            "rollout.max_completion_tokens": 640,
            "eval.at_start": False,
            "eval.at_end": False,
            "learn.max_pack_tokens": 16384,
        }
        config = load_config(
            RECIPE, [f"{name}={json.dumps(value, default=str)}" for name, value in changes.items()]
        )
        tasks = build_tasks(config.tasks, config.run.seed).train_tasks()
        toolstar_agent.REFERENCES.update(
            (clean(task.question), task.reference[0]) for task in tasks
        )
        watcher = Watcher()
        run_dir = train(config, display=watcher).run_dir  # type: ignore[arg-type]
    return run_dir, folder / "corpus.jsonl", tokenizer, watcher


def save_tiny_model(folder: Path) -> Any:
    """Saves a random Llama with SmolLM2's tokenizer and returns the tokenizer."""
    from treegraft.policy.tiny import build_tiny_model
    from treegraft.settings.policy import TinySettings

    tokenizer = smollm2()
    shape = TinySettings(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=16,
        max_context=4096,
    )
    model = build_tiny_model(
        shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


Made = tuple[Path, Path, Any, Watcher]


def paths(made: Made) -> list[tuple[int, Trajectory]]:
    """Every trajectory of the run with its habit's number."""
    trees = read_trees(made[0])
    assert [len(tree.leaves) for tree in trees] == [len(HABITS)] * 4
    return [(number, path) for tree in trees for number, path in enumerate(tree.trajectories())]


def written(tokenizer: Any, path: Trajectory, origin: Origin) -> list[str]:
    """Text of each step's tokens of one origin."""
    columns = [step.token_ids[step.origins == origin].tolist() for step in path.steps[1:]]
    return [tokenizer.decode(ids) for ids in columns]


def test_prompts_are_our_system_prompt_and_the_question(made: Made) -> None:
    tokenizer = made[2]
    for _, path in paths(made):
        before, _, rest = tokenizer.decode(path.prompt_ids).partition(
            "<|im_end|>\n<|im_start|>user\n"
        )
        assert before.startswith(
            "<|im_start|>system\nAnswer the user's question.\nBegin each turn with your reasoning"
        )
        for sentence in (
            "<search>...</search> Searches",
            "<python>...</python> Runs Python code",
            "Never write <result>",
        ):
            assert sentence in before
        assert "\\boxed{...}" in before and "\x08" not in before
        assert rest == f"{clean(path.task.question)}<|im_end|>\n<|im_start|>assistant\n"
        assert path.steps[0].num_by(Origin.PROMPT) == len(path.prompt_ids)


def test_the_agents_tokens_are_its_own_and_carry_the_loss(made: Made) -> None:
    tokenizer = made[2]
    for number, path in paths(made):
        reference = path.task.reference[0]
        question = clean(path.task.question)
        for count, (step, text) in enumerate(
            zip(path.steps[1:], written(tokenizer, path, Origin.POLICY), strict=True)
        ):
            said = HABITS[number](question, reference, count)
            end = "<|im_end|>" if "</answer>" in said else ""
            is_cut = number in (4, 5)  # at the first closing tag of a tool, and at the token limit
            assert said.startswith(text) if is_cut else text == said + end
            assert (
                set(step.origins) <= {Origin.POLICY, Origin.TOOL}
                and step.loss_mask.tolist() == step.sampled_mask.tolist()
            )
            assert step.sampling_logprobs.tolist() == (-0.5 * step.sampled_mask).tolist()
        own = [origin is Origin.POLICY for origin in path.origins]
        assert path.sampled_mask == path.loss_mask == own and any(own)
        assert not any(own[: len(path.prompt_ids)])


def test_results_are_what_the_tools_give(made: Made) -> None:
    from treegraft.extras.python.monty_tool import MontyTool
    from treegraft.extras.python.plugin import PythonToolSettings
    from treegraft.extras.search.local import open_corpus
    from treegraft.tools.search.tool import SearchTool

    tokenizer = made[2]
    search = SearchTool(open_corpus(str(made[1])), top_k=3)
    python = MontyTool(PythonToolSettings())
    kinds: set[str] = set()

    async def results(path: Trajectory) -> list[str]:
        """What each call gives when it is made again, in at most 600 characters."""
        found = []
        for call in (
            call for content in path.contents for call in content.calls[: len(content.observations)]
        ):
            kinds.add(call.name)
            if call.name == "search":
                assert call.body == search_of(clean(path.task.question))
                found.append(await search(call.body, path.task))
            elif "/ 0" in call.body:
                found.append("ZeroDivisionError: division by zero")
            else:
                found.append(await python(call.body, path.task))
        return found

    async def compare() -> None:
        for _, path in paths(made):
            shown = [text for text in written(tokenizer, path, Origin.TOOL) if text]
            expected = await results(path)
            observations = [seen for content in path.contents for seen in content.observations]
            for text, whole, seen in zip(shown, expected, observations, strict=True):
                body = text.removeprefix("\n<result>\n").removesuffix("\n</result>\n")
                assert text == f"\n<result>\n{body}\n</result>\n"
                assert len(seen.text) <= 600 and seen.is_truncated == (len(whole) > 600)
                assert body == clean(seen.text)
                assert (
                    seen.text == whole
                    if len(whole) <= 600
                    else whole.startswith(seen.text.partition("\n[output cut")[0])
                )
                assert seen.is_error == whole.startswith("ZeroDivisionError")
        await python.close()

    asyncio.run(compare())
    assert kinds == {"search", "python"}


EXPECTED: list[tuple[Status, float | None, str | None]] = [
    (Status.COMPLETED, 1.1, None),
    (Status.COMPLETED, 1.0, None),
    (Status.COMPLETED, None, None),
    (Status.FORMAT_VIOLATION, -1.0, "no thought before <answer>"),
    (Status.FORMAT_VIOLATION, -1.0, "<result> is not the agent's to write"),
    (Status.TRUNCATED, -1.0, None),
    (Status.FORMAT_VIOLATION, -1.0, "an answer without \\boxed{}"),
    (Status.TRUNCATED, -1.0, None),
]
"""Status, reward (None: see ALMOST) and violation of each habit."""


def test_statuses_and_rewards_follow_the_hierarchy(made: Made) -> None:
    for number, path in paths(made):
        status, reward, violation = EXPECTED[number]
        reference = path.task.reference[0]
        expected = ALMOST[reference] if reward is None else reward
        assert (path.status, path.steps[-1].violation) == (status, violation)
        assert path.reward == pytest.approx(expected) and path.leaf.reward_parts == {
            "hierarchical": path.reward
        }
        assert path.leaf.is_correct is (number < 2)
        said = f"{reference} zzz" if number == 2 else reference
        assert path.leaf.answer == (said if status is Status.COMPLETED else None)
    endings = {number: path.steps[-1].stop_reason for number, path in paths(made)}
    assert endings[0] is endings[3] is StopReason.END
    assert (endings[5], endings[7]) == (StopReason.LENGTH, StopReason.TOOL_CALLS)
    lengths = {len(path.completion_ids) for number, path in paths(made) if number == 5}
    assert lengths == {640}
    assert {path.num_tool_calls for number, path in paths(made) if number == 7} == {4}
