"""RAPO and ARPO against GRPO, all ours: updates of the same tasks that take turns on the same,
frozen weights.

The agent is the recipe's after its warm-up, made once and kept in the work folder. An update is
rollout, credit, learning (at a learning rate of 0) and publish; retrieval and tools are the
recipe's.

What saved tokens predict is GRPO's rollout time times the ratio of unique tokens after the prompts,
plus its learning time times the ratio of unique tokens learned from, plus its publish time. Calls
run beside the engine, and their time is printed: in this world it is too small to count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.speed.measure import Case, Row, time_row
from benchmarks.speed.stage import Stage
from treegraft.core.errors import DataError
from treegraft.core.types import Tree
from treegraft.policy.learn.pack import num_tree_tokens
from treegraft.session import Session
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.tasks.sampler import draw_tasks
from treegraft.train import sft

METHODS = {"GRPO": '["independent"]', "RAPO": '["graft"]', "ARPO": '["entropy"]'}
_QUICK: Mapping[str, Any] = {
    "run": {"tasks_per_update": 2, "num_threads": 1},
    "model": {
        "path": "tiny",
        "dtype": "float32",
        "tiny": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "intermediate_size": 64,
            "max_context": 96,
        },
    },
    "tasks": {
        "num_train": 12,
        "num_eval": 4,
        "search_world": {"words": False, "hops": [1, 2], "num_entities": 8, "num_relations": 5},
    },
    "format": {"system_prompt": "", "require_think": False},
    "explore": {"num_leaves": 4, "entropy": {"num_starts": 2}, "graft": {"num_hybrid": 2}},
    "rollout": {"max_completion_tokens": 48},
    "warmup": {"num_steps": 32, "batch_size": 12, "lr_warmup_steps": 3, "lr": 1e-2},
    "buffer": {"encoder": "hashing"},
}
"""What makes the recipe a test of seconds."""


def method_cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts that compare methods."""
    return {f"method {name}": partial(_compare, stage, name) for name in ("RAPO", "ARPO")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one update took."""

    rollout_s: float
    learn_s: float
    publish_s: float
    num_sampled: int
    num_new_tokens: int
    """Unique tokens after the prompts, sampled or not."""
    num_learned: float
    """Unique tokens in the learner's passes."""
    num_calls: int
    tool_s: float
    """Summed over calls."""

    @property
    def update_s(self) -> float:
        return self.rollout_s + self.learn_s + self.publish_s


def _compare(stage: Stage, name: str) -> Iterator[Row]:
    """One method against GRPO; the same tasks and noise for both, update by update."""
    checkpoint = _agent(stage)
    costs: dict[str, list[Cost]] = {"GRPO": [], name: []}
    with ExitStack() as stack:
        methods = {
            each: stack.enter_context(Session(_config(stage, each, checkpoint))) for each in costs
        }
        for update in range(1, stage.num_runs + 2):
            for each in list(costs) if update % 2 else list(costs)[::-1]:
                cost = _update(methods[each], update)
                if update > 1:
                    costs[each].append(cost)
    for each, found in costs.items():
        stage.say(f"   {each}: {_described(found)}")
    yield from _rows(name, costs["GRPO"], costs[name])


def _rows(name: str, grpo: Sequence[Cost], own: Sequence[Cost]) -> Iterator[Row]:
    against = "GRPO, both ours, same tasks, noise and frozen weights"
    what = f"{name}, smollm2_search recipe"
    yield time_row(
        f"{what}: rollout", against, [c.rollout_s for c in own], [c.rollout_s for c in grpo]
    )
    yield time_row(
        f"{what}: rollout and update",
        against,
        [c.update_s for c in own],
        [c.update_s for c in grpo],
    )
    predicted = [predict(mine, other) for mine, other in zip(own, grpo, strict=True)]
    what = f"{what}: rollout and update, against what its tokens predict"
    yield time_row(
        what,
        "GRPO's times, scaled by the ratios of tokens sampled and learned from",
        [c.update_s for c in own],
        predicted,
    )


def predict(own: Cost, grpo: Cost) -> float:
    """Returns the seconds that a method's update should take by its tokens, had it GRPO's rates."""
    learn = grpo.learn_s * own.num_learned / grpo.num_learned if grpo.num_learned else own.learn_s
    rollout = grpo.rollout_s * own.num_new_tokens / grpo.num_new_tokens
    return rollout + learn + grpo.publish_s


def _described(costs: Sequence[Cost]) -> str:
    def middle(name: str) -> float:
        values: list[float] = [getattr(cost, name) for cost in costs]
        return statistics.median(values)

    return (
        f"rollout {middle('rollout_s'):.2f} s, learning {middle('learn_s'):.2f} s, publish"
        f" {middle('publish_s'):.2f} s, {middle('num_sampled'):.0f} tokens sampled,"
        f" {middle('num_new_tokens'):.0f} after prompts, {middle('num_learned'):.0f} learned from,"
        f" {middle('num_calls'):.0f} calls of {1000 * middle('tool_s'):.1f} ms in all"
    )


# ---------------------------------------------------------------------- the agent and its updates


def recipe_path(name: str) -> Path:
    """Returns a recipe of the clone.

    Raises:
        DataError: there is none, as in an installed package.
    """
    places = [
        Path.cwd() / "recipes" / name,
        *(parent / "recipes" / name for parent in Path(__file__).resolve().parents),
    ]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"recipes/{name} is not here; expected the recipes of a clone. Run the command where"
            " the folder lies."
        )
    return found


def _config(stage: Stage, method: str, checkpoint: Path) -> Config:
    """The recipe with a method, frozen: a learning rate of 0 and no warm-up."""
    return load_config(
        _settings(stage),
        [
            f"explore.explorers={METHODS[method]}",
            f"model.path={checkpoint}",
            "learn.lr=0",
            "warmup.num_steps=0",
        ],
    )


def _settings(stage: Stage) -> dict[str, Any]:
    import tomllib

    settings = tomllib.loads(recipe_path("smollm2_search.toml").read_text(encoding="utf-8"))
    if stage.is_quick:
        settings = _merged(settings, _QUICK)
    settings["run"] = {**settings["run"], "num_threads": stage.threads}
    return settings


def _merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the tables of `other` merged in."""
    merged = dict(base)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _agent(stage: Stage) -> Path:
    """Returns a checkpoint of the warmed-up agent; the warm-up takes minutes, once."""
    note = stage.folder / f"agent-{'tiny' if stage.is_quick else 'smollm2_search'}.txt"
    if note.exists() and Path(note.read_text(encoding="utf-8")).is_dir():
        return Path(note.read_text(encoding="utf-8"))
    stage.say("warming the agent up, once")
    config = load_config(
        _settings(stage),
        ["run.name=bench-agent-tiny" if stage.is_quick else "run.name=bench-agent"],
    )
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"dir": str(stage.folder)})}
    )
    checkpoint = sft(config).checkpoint_dir.absolute()
    note.write_text(str(checkpoint), encoding="utf-8")
    return checkpoint


def _update(session: Session, number: int) -> Cost:
    """Runs update `number` by one method and returns what it took."""
    run = session.config.run
    size = run.tasks_per_update
    tasks = session.tasks
    drawn = draw_tasks(tasks, (number - 1) * size, size=size, seed=run.seed)
    began = time.perf_counter()
    trees = session.sample(number, drawn)
    rolled = time.perf_counter()
    trees = session.learn(session.credit(trees), number)
    learned = time.perf_counter()
    session.sync_weights(number)
    done = time.perf_counter()
    seconds = (rolled - began, learned - rolled, done - learned)
    return _cost(trees, session.pop_metrics(), seconds)


def _cost(
    trees: Sequence[Tree], metrics: Mapping[str, float], seconds: tuple[float, float, float]
) -> Cost:
    calls = sum(tree.budget.num_tool_calls for tree in trees)
    spent = sum(
        value * metrics.get(f"tools/{key.removeprefix('time/tool_').removesuffix('_s')}_calls", 0.0)
        for key, value in metrics.items()
        if key.startswith("time/tool_") and key.endswith("_s")
    )
    return Cost(
        rollout_s=seconds[0],
        learn_s=seconds[1],
        publish_s=seconds[2],
        num_sampled=sum(tree.budget.num_sampled_tokens for tree in trees),
        num_new_tokens=sum(num_tree_tokens(tree) - len(tree.root.token_ids) for tree in trees),
        num_learned=metrics["learn/num_unique_tokens"],
        num_calls=calls,
        tool_s=spent,
    )
