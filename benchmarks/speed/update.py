"""Learning: forward and backward of a tree's log-probabilities, packed, against one padded row per
trajectory.

The rows of a tree have one length here, so nothing is padded in truth: the best case of padding.
Their log-probabilities are taken at completion positions only, in micro-batches of 8; ours computes
entropies as well. Gradients are compared before any timing.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.speed.measure import Case, Row, Side, alternate, time_row
from benchmarks.speed.stage import Stage, passage
from treegraft.core.errors import EngineError
from treegraft.core.types import Leaf, Origin, Status, Step, Task, Tree
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import chunked_scores
from treegraft.policy.output_head import OutputHead, base_model, decoder, layer_heads
from treegraft.settings.policy import LearnSettings, LossSettings

MICRO_BATCH = 8
_LIMITS = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest norm of the difference of two gradients over the norm of the padded one; bfloat16 is off
by .03 to .05 in any layout."""
_MEMORY_SHAPE = "3.3"


@dataclass(frozen=True, slots=True)
class Shape:
    """Trees of one prompt and leaves of one step each, all of one length."""

    num_trees: int
    prompt: int
    leaves: int
    tokens: int

    @property
    def num_unique(self) -> int:
        return self.num_trees * (self.prompt + self.leaves * self.tokens)

    @property
    def num_flat(self) -> int:
        """Tokens of the trajectories apart."""
        return self.num_trees * self.leaves * (self.prompt + self.tokens)

    @property
    def ratio(self) -> float:
        """How many times a token is shared in the mean."""
        return self.num_flat / self.num_unique

    @property
    def num_pairs(self) -> tuple[int, int]:
        """Pairs of tokens of which one sees the other: in trees, and in trajectories apart."""
        own, above = (
            _num_causal(self.prompt) + self.leaves * _num_causal(self.tokens),
            self.leaves * self.prompt * self.tokens,
        )
        return self.num_trees * (own + above), self.num_trees * self.leaves * _num_causal(
            self.prompt + self.tokens
        )


def _num_causal(count: int) -> int:
    return count * (count + 1) // 2


def multiplication_ratio(shape: Shape, model: Any) -> float:
    """Returns the multiplications of a forward pass over trajectories apart, over those of a packed
    one."""
    config = base_model(model).config.get_text_config()
    linear = sum(
        module.weight.numel()
        for module in decoder(model).modules()
        if isinstance(module, nn.Linear)
    )
    pair = 2 * config.num_attention_heads * sum(width for _, width in layer_heads(config))
    head = (
        shape.num_trees * shape.leaves * shape.tokens * model.get_output_embeddings().weight.numel()
    )
    packed, apart = (
        linear * tokens + pair * pairs + head
        for tokens, pairs in zip((shape.num_unique, shape.num_flat), shape.num_pairs, strict=True)
    )
    return float(apart / packed)


SHAPES = {
    "3.3": Shape(1, 256, 8, 64),
    "2.8": Shape(1, 279, 16, 128),
    "2": Shape(1, 146, 16, 128),
    "1.3": Shape(1, 64, 16, 192),
    "1": Shape(8, 128, 1, 128),
}
QUICK = {"3.3": Shape(1, 32, 8, 8), "1": Shape(3, 8, 1, 8)}


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed update`."""
    shapes = stage.pick(SHAPES, QUICK)
    found: dict[str, Case] = {}
    for dtype in ("float32", "bfloat16"):
        found |= {
            f"{name} {dtype}": partial(_time, stage, shape, dtype) for name, shape in shapes.items()
        }
    for dtype in ("float32", "bfloat16"):
        found[f"memory {dtype}"] = partial(_memory, stage, shapes[_MEMORY_SHAPE], dtype)
    return found


def _time(stage: Stage, shape: Shape, dtype: str) -> Iterator[Row]:
    packed, padded = Packed(stage, shape, dtype), Padded(stage, shape, dtype)
    gap = _gradient_gap(packed, padded)
    if not gap <= _LIMITS[dtype]:
        raise EngineError(
            f"benchmark: the gradients of packed trees and padded rows differ by {gap:.3g} of their"
            f" norm; expected at most {_LIMITS[dtype]:g} in {dtype}. What is wrong is not worth"
            " timing."
        )
    stage.say(f"   gradients differ by {gap:.2g} of their norm")
    sides = {
        name: Side(lambda _, side=side: side.run(), before=lambda _, side=side: side.clear())  # type: ignore[misc]
        for name, side in (("packed", packed), ("padded", padded))
    }
    seconds = alternate(sides, stage.num_runs, num_first=0)
    what = (
        f"update, share ratio {shape.ratio:.2f} ({shape.num_unique} of {shape.num_flat} tokens),"
        f" {dtype}"
    )
    row = time_row(what, "padded rows, same dtype", seconds["packed"], seconds["padded"])
    most = multiplication_ratio(shape, padded.model)
    stage.say(
        f"   {row.ratio / shape.ratio:.0%} of the share ratio; {row.ratio / most:.0%} of"
        f" {most:.2f}, the ratio of multiplications: every sampled token goes through the head on"
        " both sides"
    )
    yield row


def _gradient_gap(packed: Packed, padded: Padded) -> float:
    """Returns ‖g - g'‖ / ‖g'‖, sums in float64."""
    packed.run()
    padded.run()
    ours = packed.gradients()
    difference = norm = 0.0
    for name, parameter in padded.model.named_parameters():
        assert parameter.grad is not None and name in ours, f"no gradient of {name}"
        mine = ours[name]
        difference += float((mine.double() - parameter.grad.double()).square().sum())
        norm += float(parameter.grad.double().square().sum())
    return math.sqrt(difference / norm)


# ---------------------------------------------------------------------- the two sides


class Packed:
    """Ours: the learner's scores of packed trees, whatever way it chooses."""

    def __init__(self, stage: Stage, shape: Shape, dtype: str) -> None:
        model = stage.load(dtype)[0]
        learn = LearnSettings(max_pack_tokens=1 << 20)
        self._learner = Learner(model, learn, LossSettings(), length_constant=shape.tokens)
        self.model = self._learner.model
        self._batch = pack_trees(example_trees(shape, stage.text), device=self._learner.device)
        weights = leaf_weights(shape.num_trees * shape.leaves).to(self._learner.device)
        self._weights = weights[self._batch.trajectories]

    def run(self) -> None:
        """Adds Σ weight · log-probability to the gradients."""
        logprobs = self._learner.scores(self._batch)[0]
        (self._weights * logprobs.index_select(0, self._batch.tokens)).sum().backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients by name."""
        return self._learner.optimiser.gradients()

    def clear(self) -> None:
        """Drops the gradients."""
        self._learner.optimiser.clear()


class Padded:
    """One row per trajectory through the plain model."""

    def __init__(self, stage: Stage, shape: Shape, dtype: str, *, is_chunked: bool = False) -> None:
        """Args: is_chunked: logits of learn.vocab_chunk positions at a time, computed again in the
        backward pass, as ours does it.
        """
        self.model = stage.load(dtype)[0]
        paths = [path for tree in example_trees(shape, stage.text) for path in tree.trajectories()]
        self._rows = torch.tensor([path.token_ids for path in paths], device=self.model.device)
        self._weights = leaf_weights(len(paths)).to(self.model.device)
        self._first, self._is_chunked = shape.prompt, is_chunked

    def run(self) -> None:
        """Adds Σ weight · log-probability to the gradients."""
        for rows, weights in zip(
            self._rows.split(MICRO_BATCH), self._weights.split(MICRO_BATCH), strict=True
        ):
            (weights[:, None] * self._logprobs(rows)).sum().backward()

    def _logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        targets = rows[:, self._first :]
        hidden = decoder(self.model)(input_ids=rows, use_cache=False).last_hidden_state[
            :, self._first - 1 : -1
        ]
        if not self._is_chunked:
            logits = self.model.get_output_embeddings()(hidden).float()
            return torch.log_softmax(logits, -1).gather(2, targets[..., None])[..., 0]
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        ones = torch.ones(wanted.shape, device=wanted.device)
        return chunked_scores(
            OutputHead(self.model), flat, wanted, ones, LearnSettings().vocab_chunk
        )[0].view(targets.shape)

    def clear(self) -> None:
        """Drops the gradients."""
        self.model.zero_grad(set_to_none=True)


def leaf_weights(count: int) -> torch.Tensor:
    """Returns [count] numbers of both signs, as advantages are."""
    return torch.linspace(-1.0, 1.5, count) if count > 1 else torch.ones(1)


def example_trees(shape: Shape, text: Sequence[int]) -> list[Tree]:
    """Returns trees of passages of a text."""
    generator = torch.Generator().manual_seed(0)

    def step(step_id: str, count: int, origin: Origin) -> Step:
        ids = passage(text, count, generator)
        zeros, own = (0.0,) * count, origin is Origin.POLICY
        return Step(
            id=step_id,
            parent="0" if own else None,
            depth=int(own),
            token_ids=ids,
            origins=(origin,) * count,
            loss_mask=(own,) * count,
            sampling_logprobs=zeros,
            entropies=zeros,
        )

    trees = []
    for number in range(shape.num_trees):
        own = [step(f"0.{n}", shape.tokens, Origin.POLICY) for n in range(shape.leaves)]
        leaves = tuple(Leaf(step_id=one.id, status=Status.COMPLETED, reward=0.0) for one in own)
        steps = (step("0", shape.prompt, Origin.PROMPT), *own)
        trees.append(
            Tree(
                task=Task(id=f"bench/{number}", question="", reference=()),
                group_id=f"{number}",
                steps=steps,
                leaves=leaves,
            )
        )
    return trees


# ---------------------------------------------------------------------- memory


SIDES: Mapping[str, Any] = {
    "ours": Packed,
    "padded": Padded,
    "chunked": partial(Padded, is_chunked=True),
}


def _memory(stage: Stage, shape: Shape, dtype: str) -> Iterator[Row]:
    """The rise of resident memory in fresh processes."""
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(stage.num_runs):
        for name, values in found.items():
            asked = {
                "side": name,
                "shape": asdict(shape),
                "dtype": dtype,
                "model": stage.model,
                "is_quick": stage.is_quick,
            }
            risen = _in_child(asked | {"num_threads": stage.threads, "folder": str(stage.folder)})
            if risen is None:
                stage.note(
                    "left out: this system does not tell how much memory a process had at most"
                )
                return
            values.append(risen / 1e6)
    mine = statistics.median(found["ours"])
    what = f"update memory, share ratio {shape.ratio:.2f}, {dtype}, gradients included"
    for name, against in (
        ("padded", "padded rows"),
        ("chunked", "padded rows, logits in chunks as ours"),
    ):
        other = statistics.median(found[name])
        yield Row(
            what=what,
            against=against,
            ratio=other / mine,
            ours=mine,
            theirs=other,
            unit="MB",
            num_runs=stage.num_runs,
        )


def _in_child(asked: Mapping[str, Any]) -> int | None:
    command = [sys.executable, "-m", "benchmarks.speed.memory", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(
            f"benchmark: measuring memory failed: {done.stderr.strip().splitlines()[-1:]}"
        )
    risen: int | None = json.loads(done.stdout.strip().splitlines()[-1])
    return risen
