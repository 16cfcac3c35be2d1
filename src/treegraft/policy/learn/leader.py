"""Rank 0's learner, which has the other ranks make the same calls, and their loop over its
orders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from treegraft.core.errors import ModelError, SettingError
from treegraft.core.interfaces import WeightSource
from treegraft.core.spans import joined, span
from treegraft.policy.learn.orders import arguments_of, order_of
from treegraft.policy.learn.ranks import Ranks, deaf_to_ends
from treegraft.policy.learn.scores import packing_problem
from treegraft.policy.learn.sharded import ShardedLearner
from treegraft.policy.learn.weight_files import WeightFiles, cut_model, model_shape
from treegraft.policy.output_head import head_problem
from treegraft.policy.weights import adapted_modules
from treegraft.settings.config import Config

P = ParamSpec("P")
R = TypeVar("R")

CALLS: dict[str, Callable[..., Any]] = {
    "fingerprint": ShardedLearner.fingerprint,
    "stream": lambda learner: [None for _ in learner.stream()],
}
"""What rank 0 may order, by name; `on_every_rank` adds to it."""


def on_every_rank(
    method: Callable[Concatenate[ShardedLearner, P], R],
) -> Callable[Concatenate[Leader, P], R]:
    """Returns a method of `Leader` that calls this one of the learner on every rank, with the same
    arguments (see `order_of`), and returns rank 0's result."""
    name = method.__name__
    CALLS[name] = method

    @functools.wraps(method)
    def call(leader: Leader, /, *args: P.args, **options: P.kwargs) -> R:
        order, columns = order_of(args, options)
        with leader.ranks.ordered(name, columns, **order):
            return method(leader.learner, *args, **options)

    return call


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
            files: from which each rank reads its rows, see `weight_files.shardable_files`.
            checkpoint: whose optimiser's state to go on from; None for the beginning.

        Raises:
            ModelError: a model that several ranks cannot learn.
            SettingError: LoRA targets that are no linear layers.
            RankError: a rank has ended.
        """
        self.ranks, shape = ranks, model_shape(model)
        # Where only the shape is known, a layer of each kind is tried.
        _refuse(model if files is None else cut_model(shape), config)
        names = None if files is None else [str(file) for file in files]
        with ranks.ordered("build", shape=shape, files=names):
            self.learner = _built(ranks, shape, config, names, model)
        if checkpoint is not None:
            self._load(checkpoint)

    _load = on_every_rank(ShardedLearner.load)
    with_exact_entropies = on_every_rank(ShardedLearner.with_exact_entropies)
    with_logprobs = on_every_rank(ShardedLearner.with_logprobs)
    learn = on_every_rank(ShardedLearner.learn)
    imitate = on_every_rank(ShardedLearner.imitate)
    right_steps = on_every_rank(ShardedLearner.right_steps)
    forget_moments = on_every_rank(ShardedLearner.forget_moments)
    # Every rank needs the folders of these two.
    keep_reference = on_every_rank(ShardedLearner.keep_reference)
    save = on_every_rank(ShardedLearner.save)

    def weights(self) -> WeightSource:
        """Returns the plain model's weights, gathered from the ranks one after another each time
        that they are gone through."""
        return StreamedWeights(self.ranks, self.learner)


class StreamedWeights:
    """Weights that are divided among ranks as a `WeightSource`."""

    def __init__(self, ranks: Ranks, learner: ShardedLearner) -> None:
        self._ranks, self._learner = ranks, learner
        self.names = learner.names

    @functools.cached_property
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


def serve_rank(ranks: Ranks, config: Config) -> Mapping[str, Any] | None:
    """Carries out rank 0's orders until it ends the run, and returns the run's result; None where
    it has failed.

    Raises:
        RankError: rank 0 has ended without one.
    """
    learner: ShardedLearner | None = None
    # As rank 0's own training, whatever mode of torch the script has set.
    with deaf_to_ends(), torch.inference_mode(False):
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
                    args, options = arguments_of(order)
                    CALLS[name](learner, *args, **options)
        except BaseException as error:
            ranks.last_words(error)
            raise


def _built(
    ranks: Ranks, shape: str, config: Config, files: Sequence[str] | None, source: Any
) -> ShardedLearner:
    if files is None:
        return ShardedLearner(ranks, shape, config, source=source)
    found = WeightFiles([*map(Path, files)], shape, config.model.dtype)
    return ShardedLearner(ranks, shape, config, files=found)


def _refuse(model: Any, config: Config) -> None:
    """Refuses what one process can learn and several cannot."""
    if problem := head_problem(model):
        raise ModelError(
            f"learner: this model cannot be trained here: {problem}", code="model-not-trainable"
        )
    problem = packing_problem(model, compile_kernels=config.learn.compile_kernels)
    if problem is not None:
        raise ModelError(
            f"model '{config.model.path}': its trees cannot be packed ({problem}), which several"
            " ranks need; expected a model with plain attention. Train it with one rank.",
            code="trees-not-packed",
        )
    if any("default" not in module.lora_A for module in adapted_modules(model).values()):
        raise SettingError(
            f"model.lora.targets: got {config.model.lora.targets!r}, of which some are no linear"
            " layers; several ranks expect linear layers alone. Leave the others out, or train with"
            " one rank.",
            code="lora-targets-not-linear",
        )
