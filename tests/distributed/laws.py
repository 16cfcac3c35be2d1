"""Checks that each rank of a torchrun job makes; rank 0 compares with a learner of one process and
prints one line of JSON for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.families import build_model
from tests.slow_learner import example_trees

from treegraft.core.types import Tree
from treegraft.policy.learn.leader import Leader
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.ranks import Ranks
from treegraft.policy.load import with_adapters
from treegraft.policy.weights import plain_weights
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

RANKS: list[Ranks] = []


def settings(**tables: Any) -> Config:
    base = {"learn": {"lr": 1e-2, "max_pack_tokens": 24, "vocab_chunk": 5}}
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table}
    base.setdefault("loss", {}).setdefault("length_constant", None)
    return load_config(base)


def trees_of(count: int) -> list[Tree]:
    found = [tree for _ in range(2) for tree in example_trees(4)]
    return [replace(tree, group_id=str(n)) for n, tree in enumerate(found)][:count]


def report(name: str, **values: Any) -> None:
    print(json.dumps({"check": name, **values}), flush=True)


def distance(ours: dict[str, Any], theirs: dict[str, Any], start: dict[str, Any]) -> float:
    """How far two sets of weights are apart, as a share of how far they moved."""
    gap = torch.cat([(ours[name] - theirs[name]).double().flatten() for name in start]).norm()
    moved = torch.cat([(theirs[name] - start[name]).double().flatten() for name in start]).norm()
    return float(gap / moved)


def compare(name: str, family: str, config: Config, trees: Callable[[], list[Tree]]) -> None:
    """Three updates by all ranks and by one process."""
    plain = with_adapters(build_model(family), config.model, seed=config.run.seed)
    source = with_adapters(build_model(family), config.model, seed=config.run.seed)
    start = {key: value.clone() for key, value in plain_weights(plain).items()}
    one = Learner(
        plain,
        config.learn,
        config.loss,
        length_constant=config.rollout.max_completion_tokens,
        num_updates=config.run.num_updates,
    )
    many = Leader(RANKS[0], source, config)
    gaps: list[float] = []
    for _ in range(3):
        (ours, told), (theirs, right) = many.learn(trees()), one.learn(trees())
        assert told.keys() == right.keys(), (told.keys() ^ right.keys())
        for key, value in right.items():
            gaps.append(abs(told[key] - value) / max(1e-3, abs(value)))
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(a.steps, b.steps, strict=True):
                assert (x.old_logprobs is None) == (y.old_logprobs is None)
                for p, q in ((x.old_logprobs, y.old_logprobs), (x.ratios, y.ratios)):
                    gaps.append(max((abs(u - v) for u, v in zip(p or (), q or (), strict=True)), default=0.0))
    weights = many.weights()
    held = dict(weights)
    report(
        name,
        apart=distance(held, plain_weights(one.model), start),
        metrics=max(gaps),
        same_fingerprint=weights.fingerprint == one.weights().fingerprint,
        own_fingerprint=weights.fingerprint == fingerprint(held),
        equal=all(torch.equal(held[key], value) for key, value in plain_weights(one.model).items()),
    )


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    from treegraft.policy.weights import weights_fingerprint

    return weights_fingerprint(weights)
