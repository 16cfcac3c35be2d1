"""Checks that every rank of a torchrun job makes: python -m tests.distributed.laws FOLDER NAME...

Rank 0 compares with a learner of one process, and prints a line of JSON for each check.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.families import build_model
from tests.support.slow_learner import example_trees
from tests.support.trees import Part, build_tree, with_contexts

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import Tree
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.ranks import Ranks
from treegraft.policy.learn.sharded import ShardedLearner, model_shape
from treegraft.policy.learn.torchrun import joined
from treegraft.policy.load import with_adapters
from treegraft.policy.shards import TensorFiles
from treegraft.policy.weights import plain_weights, weights_fingerprint
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

Weights = dict[str, torch.Tensor]

GRAFTED = Part.of(
    "ppppp",
    Part.of("ss", Part.of("rrr", Part("s", reward=1.0), lesson=4), Part("ss", reward=0.0)),
    Part("sss", reward=0.0),
)


def settings(**tables: Any) -> Config:
    """Small packs, so that trees are split and there are several packs."""
    learn = {"lr": 1e-2, "max_pack_tokens": 24}
    return load_config({**tables, "learn": {**learn, **tables.get("learn", {})}})


def some_trees(num: int = 8) -> list[Tree]:
    found = [tree for _ in range(2) for tree in example_trees(4)][:num]
    return [replace(tree, group_id=str(n)) for n, tree in enumerate(found)]


def trees_with_contexts() -> list[Tree]:
    """Trees whose steps saw contexts of their own."""
    return [assign_credit(with_contexts(tree, seed)) for seed, tree in enumerate(some_trees())]


def grafted_trees() -> list[Tree]:
    made = [build_tree(GRAFTED, task_id=f"g/{n}", seed=n) for n in range(5)]
    return [assign_credit(tree) for tree in made]


def stored_lessons() -> list[Tree]:
    """Five lessons of a `LessonBook`, the second of weight 0."""
    made = [build_tree(Part.of("pp", Part.of("sst", Part("ss"))), seed=n) for n in range(5)]
    return [
        replace(tree, leaves=(replace(tree.leaves[0], advantage=0.25 * (n != 1)),))
        for n, tree in enumerate(made)
    ]


def learners(
    ranks: Ranks, config: Config, family: str = "llama"
) -> tuple[Learner | None, ShardedLearner]:
    """The learner of one process, on rank 0 alone, and that of all ranks, from equal weights."""
    models = [
        with_adapters(build_model(family), config.model, seed=config.run.seed) for _ in range(2)
    ]
    one = None
    if ranks.rank == 0:
        one = Learner(
            models[0],
            config.learn,
            config.loss,
            length_constant=config.rollout.max_completion_tokens,
            num_updates=config.run.num_updates,
        )
    source = models[1] if ranks.rank == 0 else None
    return one, ShardedLearner(ranks, model_shape(models[1]), config, source=source)


def apart(ours: Weights, theirs: Weights, start: Weights) -> float:
    """How far two sets of weights are apart, as a share of how far they moved."""

    def norm(a: Weights, b: Weights) -> float:
        return float(torch.cat([(a[key] - b[key]).double().flatten() for key in start]).norm())

    return norm(ours, theirs) / norm(theirs, start)


def farthest(ours: Sequence[Tree], theirs: Sequence[Tree]) -> float:
    """The largest difference between recorded old log-probabilities and ratios."""
    gaps = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.steps, b.steps, strict=True):
            for p, q in ((x.old_logprobs, y.old_logprobs), (x.ratios, y.ratios)):
                assert (p is None) == (q is None)
                gaps += [] if p is None else np.abs(p - q).tolist()
    return max(gaps)


def law_13(
    ranks: Ranks,
    config: Config,
    family: str = "llama",
    trees: list[Tree] | None = None,
    lessons: Sequence[Tree] = (),
) -> dict[str, Any]:
    """Three updates by all ranks and by one process: weights, metrics and records."""
    trees = some_trees() if trees is None else trees
    one, many = learners(ranks, config, family)
    if config.loss.kl_coef:
        folder = Path(sys.argv[1]) / "reference"
        many.keep_reference(folder / str(ranks.size), is_new=True)
        if one is not None:
            one.keep_reference(folder / "1", is_new=True)
    start = {name: tensor.clone() for name, tensor in many.stream()}
    metrics = [0.0]
    records = [0.0]
    for number in range(3):
        if config.loss.kl_coef and number == 1:
            # As a resumed run does: what was kept is read, and stays where it is.
            many.keep_reference(folder / str(ranks.size), is_new=False)
        ours, told = many.learn(trees, lessons)
        if one is not None:
            theirs, right = one.learn(trees, lessons)
            assert told.keys() == right.keys()
            metrics += [abs(told[key] - right[key]) / max(1.0, abs(right[key])) for key in right]
            records.append(farthest(ours, theirs))
    again = many.with_logprobs(trees)
    if one is not None:
        records.append(farthest(again, one.with_logprobs(trees)))
    loss = many.imitate(trees, 1e-2)
    streamed = dict(many.stream())
    fingerprint = many.fingerprint()
    if one is None:
        return {}
    expected = one.imitate(trees, 1e-2)
    plain = plain_weights(one.model)
    return {
        "apart": apart(streamed, plain, start),
        "equal": all(torch.equal(streamed[key], plain[key]) for key in plain),
        "metrics": max(*metrics, abs(loss - expected)),
        "records": max(records),
        "fingerprint": fingerprint == weights_fingerprint(streamed),
    }


def halved(ranks: Ranks, config: Config) -> dict[str, Any]:
    """The weights that are published of a model that computes in half precision."""
    _, many = learners(ranks, config)
    streamed = dict(many.stream())
    return {
        "types": sorted({str(tensor.dtype) for tensor in streamed.values()}),
        "fingerprint": many.fingerprint() == weights_fingerprint(streamed),
    }


def twice(ranks: Ranks, config: Config) -> dict[str, Any]:
    """Two runs at one number of ranks."""
    weights = []
    for _ in range(2):
        _, many = learners(ranks, config)
        for _ in range(2):
            many.learn(some_trees())
        weights.append(dict(many.stream()))
    return {"equal": all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])}


def resumed(ranks: Ranks, config: Config) -> dict[str, Any]:
    """Two updates, a checkpoint, one more update: by the same learner, by one of as many ranks, by
    one process; and a checkpoint of one process on several ranks."""
    folder = Path(sys.argv[1])
    _, many = learners(ranks, config)
    start = {name: tensor.clone() for name, tensor in many.stream()}
    for _ in range(2):
        many.learn(some_trees())
    place = folder / f"of-{ranks.size}"
    if ranks.rank == 0:
        (place / "treegraft").mkdir(parents=True)
    ranks.gather(torch.zeros(0))
    many.save(place)
    many.learn(some_trees())
    expected = dict(many.stream())
    one, again = learners(ranks, config)
    again.load(place)
    again.learn(some_trees())
    ours = dict(again.stream())
    other = folder / f"of-1-for-{ranks.size}"
    if one is not None:
        (other / "treegraft").mkdir(parents=True)
        one.learn(some_trees())
        one.save(other)
    ranks.gather(torch.zeros(0))
    _, third = learners(ranks, config)
    third.load(other)
    third.learn(some_trees())
    theirs = dict(third.stream())
    if one is None:
        return {}
    one.learn(some_trees())
    from_one = apart(theirs, plain_weights(one.model), start)
    rows = optimiser_rows(place)
    one.optimiser.load(rows)
    one.learn(some_trees())
    return {
        "same": all(torch.equal(ours[key], expected[key]) for key in expected),
        "apart": apart(plain_weights(one.model), expected, start),
        "from_one": from_one,
        "loads": loads_like(place, rows),
    }


def skipped(ranks: Ranks, config: Config) -> dict[str, Any]:
    """An update in which the losses of one rank are not finite, and one more."""
    _, many = learners(ranks, config)
    weights = [{name: tensor.clone() for name, tensor in many.stream()}]
    metrics = []
    plain = many._form

    def wrong(*columns: Any, **options: Any) -> Any:
        terms = plain.surrogate(*columns, **options)
        return replace(terms, losses=terms.losses * float("nan"))

    for number in range(2):
        is_wrong = ranks.rank == 1 and number == 0
        many._form = replace(plain, surrogate=wrong) if is_wrong else plain
        metrics.append(many.learn(some_trees())[1]["learn/num_skipped_steps"])
        weights.append({name: tensor.clone() for name, tensor in many.stream()})
    return {
        "metrics": metrics,
        "still": all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0]),
        "finite": all(bool(tensor.isfinite().all()) for tensor in weights[2].values()),
        "moved": any(not torch.equal(weights[1][key], weights[2][key]) for key in weights[0]),
    }


def optimiser_rows(place: Path) -> TensorFiles:
    return TensorFiles(sorted((place / "treegraft").glob("optimiser*.safetensors")))


def loads_like(place: Path, rows: TensorFiles) -> bool:
    """Whether transformers loads the folder, with the weights that the optimiser holds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    weights = dict(model.named_parameters())
    return bool(weights) and all(
        torch.equal(weight, rows.whole(f"master.{name}")) for name, weight in weights.items()
    )


CHECKS: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "llama": lambda ranks: law_13(ranks, settings()),
    "tied": lambda ranks: law_13(ranks, settings(), "llama-tied"),
    "qwen3": lambda ranks: law_13(ranks, settings(), "qwen3"),
    "minibatches": lambda ranks: law_13(
        ranks,
        settings(
            learn={"num_minibatches": 2, "num_epochs": 2, "lr": 5e-3},
            loss={"aggregation": "token-mean", "engine_ratio_cap": 2.0},
        ),
    ),
    "kl": lambda ranks: law_13(ranks, settings(loss={"kl_coef": 0.1})),
    "contexts": lambda ranks: law_13(ranks, settings(), trees=trees_with_contexts()),
    "halved": lambda ranks: halved(ranks, settings(model={"dtype": "bfloat16"})),
    "lora": lambda ranks: law_13(ranks, settings(model={"lora": {"rank": 4}})),
    "checkpointing": lambda ranks: law_13(ranks, settings(model={"gradient_checkpointing": True})),
    "stored": lambda ranks: law_13(
        ranks,
        settings(loss={"lesson_coef": 2.0}, buffer={"path": "expert"}),
        lessons=stored_lessons(),
    ),
    "lessons": lambda ranks: law_13(
        ranks, settings(loss={"graft_coef": 0.5}), trees=grafted_trees()
    ),
    "idle": lambda ranks: law_13(
        ranks, settings(learn={"max_pack_tokens": 8192, "max_grad_norm": 1e9})
    ),
    "twice": lambda ranks: twice(ranks, settings()),
    "skipped": lambda ranks: skipped(ranks, settings()),
    "resumed": lambda ranks: resumed(ranks, settings()),
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # In another job, one rank has another recipe.
    is_odd = sys.argv[2:] == ["unlike"] and os.environ["RANK"] == "1"
    with joined(settings(learn={"lr": 0.5}) if is_odd else settings()) as ranks:
        assert isinstance(ranks, Ranks)
        for name in sys.argv[2:]:
            found = CHECKS[name](ranks)
            if ranks.rank == 0:
                print(json.dumps({"check": name, **found}), flush=True)
        ranks.gather(torch.zeros(0))
        ranks.finish()


if __name__ == "__main__":
    main()
