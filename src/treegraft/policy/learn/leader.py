"""Rank 0's learner, which has the other ranks make the same calls, and their loop over its
orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treegraft.core.errors import ModelError, SettingError
from treegraft.core.interfaces import WeightSource
from treegraft.core.spans import joined, span
from treegraft.core.types import Tree
from treegraft.policy.head import head_problem
from treegraft.policy.learn.handover import packed, unpacked
from treegraft.policy.learn.pieces import Pieces, cut_model, model_shape
from treegraft.policy.learn.ranks import Ranks, deaf_to_ends
from treegraft.policy.learn.scores import packing_problem
from treegraft.policy.learn.sharded import ShardedLearner
from treegraft.policy.weights import adapted_modules
from treegraft.settings.config import Config


class Leader:
    """The learner of a run with several ranks, as rank 0 knows it (a `LearnerLike`)."""

    def __init__(
        self,
        ranks: Ranks,
        model: Any,
        config: Config,
        checkpoint: Path | None = None,
        files: Sequence[Path] | None = None,
    ) -> None:
        """Divides the weights of `model` among the ranks.

        Args:
            model: whole, with its adapters; it may be dropped afterwards. With `files` its shape
                alone.
            files: from which each rank reads its rows, see `pieces.weight_files`.
            checkpoint: whose optimiser's state to go on from; None for the beginning.

        Raises:
            ModelError: a model that several ranks cannot learn.
            SettingError: LoRA targets that are no linear layers.
            RankError: a rank has ended.
        """
        self._ranks = ranks
        shape, place = model_shape(model), None if checkpoint is None else str(checkpoint)
        # Where only the shape is known, a layer of each kind is tried.
        _refuse(model if files is None else cut_model(shape), config)
        names = None if files is None else [str(file) for file in files]
        with ranks.ordered("build", shape=shape, files=names):
            self._learner = _built(ranks, shape, config, names, model)
        if place is not None:
            self._all("load", folder=place)

    def _all(self, name: str, **arguments: Any) -> Any:
        """Makes one call on every rank and returns rank 0's result."""
        with self._ranks.ordered(name, **arguments):
            return CALLS[name](self._learner, **arguments)

    def _on_trees(self, name: str, trees: Sequence[Tree], **arguments: Any) -> Any:
        texts, columns = packed(trees)
        with self._ranks.ordered(name, columns, trees=texts, **arguments):
            return TREE_CALLS[name](self._learner, trees, **arguments)

    def with_exact_entropies(
        self, trees: Sequence[Tree], *, everywhere: bool = False
    ) -> list[Tree]:
        """As `Learner.with_exact_entropies`."""
        found: list[Tree] = self._on_trees("with_exact_entropies", trees, everywhere=everywhere)
        return found

    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        """As `Learner.with_logprobs`."""
        found: list[Tree] = self._on_trees("with_logprobs", trees)
        return found

    def learn(
        self, trees: Sequence[Tree], lessons: Sequence[Tree] = ()
    ) -> tuple[list[Tree], dict[str, float]]:
        """As `Learner.learn`."""
        found: tuple[list[Tree], dict[str, float]] = self._on_trees(
            "learn", [*trees, *lessons], num_lessons=len(lessons)
        )
        return found

    def imitate(self, trees: Sequence[Tree], lr: float, weight_decay: float | None = None) -> float:
        """As `Learner.imitate`."""
        return float(self._on_trees("imitate", trees, lr=lr, weight_decay=weight_decay))

    def right_steps(self, trees: Sequence[Tree]) -> tuple[int, int]:
        """As `Learner.right_steps`."""
        right, total = self._on_trees("right_steps", trees)
        return right, total

    def forget_moments(self) -> None:
        """As `Learner.forget_moments`."""
        self._all("forget_moments")

    def keep_reference(self, folder: Path, *, is_new: bool) -> None:
        """As `Learner.keep_reference`; every rank needs the folder."""
        self._all("keep_reference", folder=str(folder.resolve()), is_new=is_new)

    def weights(self) -> WeightSource:
        """Returns the plain model's weights, gathered from the ranks one after another each time
        that they are gone through."""
        return StreamedWeights(self._ranks, self._learner)

    def save(self, folder: Path, *, keep_adapter: bool) -> None:
        """As `Learner.save`; every rank needs the folder."""
        self._all("save", folder=str(folder.resolve()), keep_adapter=keep_adapter)


class StreamedWeights:
    """Weights that are divided among ranks as a `WeightSource`."""

    def __init__(self, ranks: Ranks, learner: ShardedLearner) -> None:
        self._ranks, self._learner = ranks, learner
        self.names = learner.names

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of all tensors, equal to that of the plain model."""
        # An engine asks in a thread of its own, which may be in inference mode.
        with self._ranks.ordered("fingerprint"), torch.inference_mode(False):
            return self._learner.fingerprint()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self._ranks.ordered("stream"):
            stream = self._learner.stream()
            try:
                # Not `yield from`, which would close the stream with this generator.
                for pair in stream:  # noqa: UP028
                    yield pair
            except GeneratorExit:
                # The others gather every tensor; one left out here would keep them waiting.
                for _ in stream:
                    pass


CALLS: Mapping[str, Callable[..., Any]] = {
    "forget_moments": lambda learner: learner.forget_moments(),
    "keep_reference": lambda learner, folder, is_new: learner.keep_reference(
        Path(folder), is_new=is_new
    ),
    "save": lambda learner, folder, keep_adapter: learner.save(
        Path(folder), keep_adapter=keep_adapter
    ),
    "load": lambda learner, folder: learner.load(Path(folder)),
    "fingerprint": lambda learner: learner.fingerprint(),
    "stream": lambda learner: [None for _ in learner.stream()],
}
"""What rank 0 may order, by name."""

TREE_CALLS: Mapping[str, Callable[..., Any]] = {
    "with_exact_entropies": lambda learner, trees, everywhere: learner.with_exact_entropies(
        trees, everywhere=everywhere
    ),
    "with_logprobs": lambda learner, trees: learner.with_logprobs(trees),
    "learn": lambda learner, trees, num_lessons: learner.learn(
        trees[: len(trees) - num_lessons], trees[len(trees) - num_lessons :]
    ),
    "imitate": lambda learner, trees, lr, weight_decay: learner.imitate(trees, lr, weight_decay),
    "right_steps": lambda learner, trees: learner.right_steps(trees),
}
"""What it may order on trees."""


def serve_rank(ranks: Ranks, config: Config) -> Mapping[str, Any] | None:
    """Carries out rank 0's orders until it ends the run, and returns the run's result; None where
    it has failed.

    Raises:
        RankError: rank 0 has ended without one.
    """
    learner: ShardedLearner | None = None
    with deaf_to_ends():
        try:
            while True:
                order = ranks.next_order()
                name, trace = order.pop("do"), order.pop("trace", None)
                if name == "end":
                    result: Mapping[str, Any] | None = order["result"]
                    return result
                with ranks.blaming(), joined(trace, f"rank {ranks.rank}"), span(name):
                    if name == "build":
                        learner = _built(ranks, order["shape"], config, order["files"], None)
                        continue
                    assert learner is not None
                    if name in TREE_CALLS:
                        order["trees"] = unpacked(order["trees"], order.pop("columns"))
                        TREE_CALLS[name](learner, **order)
                    else:
                        CALLS[name](learner, **order)
        except BaseException as error:
            ranks.last_words(error)
            raise


def _built(
    ranks: Ranks, shape: str, config: Config, files: Sequence[str] | None, source: Any
) -> ShardedLearner:
    if files is None:
        return ShardedLearner(ranks, shape, config, source=source)
    pieces = Pieces([*map(Path, files)], shape, config.model.dtype)
    return ShardedLearner(ranks, shape, config, pieces=pieces)


def _refuse(model: Any, config: Config) -> None:
    """Refuses what one process can learn and several cannot."""
    if problem := head_problem(model):
        raise ModelError(f"learner: this model cannot be trained here: {problem}")
    problem = packing_problem(model, compile_kernels=config.learn.compile_kernels)
    if problem is not None:
        raise ModelError(
            f"model '{config.model.path}': its trees cannot be packed ({problem}), which several"
            " ranks need; expected a model with plain attention. Train it with one rank."
        )
    if any("default" not in module.lora_A for module in adapted_modules(model).values()):
        raise SettingError(
            f"model.lora.targets: got {config.model.lora.targets!r}, of which some are no linear"
            " layers; several ranks expect linear layers alone. Leave the others out, or train with"
            " one rank."
        )
