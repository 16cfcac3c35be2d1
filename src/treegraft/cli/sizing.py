"""The memory of each GPU, and the split of an update's time, for a recipe on cards that need not be
here: estimates from the model's shape and a card's data sheet.

One GPU holds learner and engine as they run in one process:

    weights N·b, engine's copy N·b, masters and their gradients 4 T each, AdamW 8 T,
    the bfloat16 gradient of one tensor (they move to the masters as they are made)

G GPUs share the learner's masters, gradients and AdamW's moments, 16 T / G bytes each; a server on
each has the whole weights N·b. Two layers are gathered at a time, for the pass and ahead of it.
Activations of a pack of t tokens, with k kept numbers a token and layer:

    checkpointing   n · t · h · b + t · k · b        (one layer's are computed again at a time)
    without         n · t · k · b,                   k = 3 i + 2 q + 8 h

with n layers of width h, i of the feed-forward part and q of all query heads. Keys and values get
the rest of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from treegraft.cli.memory import BYTES, PROMPT_TOKENS, gigabytes
from treegraft.core.errors import SettingError
from treegraft.core.finding import Finding
from treegraft.policy.bounds import CARDS, Card, ModelShape, decode_bytes, forward_flops, kv_bytes
from treegraft.settings.config import Config

RESERVED = 2e9
"""Of each card for the driver's context, kernels and fragments; a guess."""
ROOMY_FLOATS = 3 * (1 << 27)
"""Numbers of the float32 copies while log-probabilities are made, see `learn.scores`."""
DECODE_SHARE, FORWARD_SHARE, LEARN_SHARE = 0.6, 0.5, 0.37
"""Assumed shares of the card's bandwidth in sampling, and of its operations in passes without and
with gradients. Assumptions, not measurements."""
SAMPLED_FRAC, BRANCH_FRAC = 0.6, 0.5
"""Assumed shares: of sampled tokens on a path behind its prompt; of a path that a branch adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a recipe is to run."""

    num_gpus: int
    card: Card

    @classmethod
    def of(cls, num_gpus: int, card: str, memory_gb: float | None) -> Plan:
        """Returns the plan for cards by name, with another memory where one is given.

        Raises:
            SettingError: the card is not known.
        """
        known = {name.lower(): one for name, one in CARDS.items()}
        if card.lower() not in known:
            raise SettingError(
                f"--gpu: got '{card}', expected one of {', '.join(CARDS)}; for another card take"
                " the nearest and give --gpu-memory"
            )
        found = known[card.lower()]
        memory = found.memory if memory_gb is None else memory_gb * 1e9
        return cls(
            num_gpus=num_gpus,
            card=Card(name=found.name, flops=found.flops, bandwidth=found.bandwidth, memory=memory),
        )


def _num_trained(config: Config, shape: ModelShape) -> int:
    rank = config.model.lora.rank
    if not rank:
        return shape.num_weights
    # Rank · (in + out) of the seven matrices of a layer: query and output, key and value, the three
    # of the feed-forward part.
    width, key = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    ends = 2 * (width + shape.query_width) + 2 * (width + key) + 3 * (width + shape.inner_width)
    return shape.num_layers * rank * ends


def gpu_parts(config: Config, shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Returns the bytes of each part on each GPU, without keys and values."""
    model, learn, width = config.model, config.learn, BYTES[config.model.dtype]
    trained, count = _num_trained(config, shape), plan.num_gpus
    weights, layer = shape.num_weights * width, shape.num_layer_weights / shape.num_layers
    frozen = (shape.num_weights - trained if model.lora.rank else 0) * width
    is_one = count == 1
    has_masters = width == 2 or not is_one
    kept = 3 * shape.inner_width + 2 * shape.query_width + 8 * shape.hidden_size
    tokens = learn.max_pack_tokens
    passes = tokens * kept * width
    if model.gradient_checkpointing:
        activations = shape.num_layers * tokens * shape.hidden_size * width + passes
    else:
        activations = shape.num_layers * passes
    rows = min(learn.vocab_chunk, tokens)
    logits = 2 * rows * shape.vocab_size * width
    floats = 4 * min(3 * rows * shape.vocab_size, ROOMY_FLOATS)
    reference = weights if config.loss.kl_coef > 0 and not model.lora.rank else 0
    parts: dict[str, float] = {
        "weights": weights if is_one else frozen / count,
        "masters": 4 * trained / count if has_masters else 0,
        "gradients": 4 * trained / count,
        "AdamW": 8 * trained / count,
        "gathered layers": 0 if is_one else 2 * layer * width,
        "engine's weights": weights,
        "reference": reference / count,
        "activations": activations,
        "logits": logits + floats,
        "reserved": RESERVED,
    }
    return {name: size for name, size in parts.items() if size}


def _path_tokens(config: Config) -> tuple[int, int]:
    """(prompt, rest) of the longest path."""
    rest = config.rollout.max_completion_tokens
    if config.model.path == "tiny":
        return max(1, config.model.tiny.max_context - rest), rest
    return PROMPT_TOKENS, rest


def _tree_tokens(config: Config) -> tuple[float, float]:
    """Tokens of a tree of longest paths: (unique, those of its trajectories apart)."""
    prompt, rest = _path_tokens(config)
    leaves = config.explore.num_leaves
    # Here, since it loads numpy, and `doctor` is to answer at once.
    from treegraft.explore.build import num_starts

    starts = min(num_starts(config.explore), leaves)
    return (
        prompt + (starts + BRANCH_FRAC * (leaves - starts)) * rest,
        float(leaves * (prompt + rest)),
    )


def _kv_wanted(config: Config, shape: ModelShape, plan: Plan) -> float:
    """Bytes of keys and values that let every row of a GPU run at its longest path."""
    rows, tokens = _rows(config, plan), sum(_path_tokens(config))
    return rows * tokens * kv_bytes(shape, BYTES[config.model.dtype])


def _rows(config: Config, plan: Plan) -> int:
    leaves = config.explore.num_leaves * config.run.tasks_per_update
    return min(config.engine.max_rows, math.ceil(leaves / plan.num_gpus))


def seconds_by_phase(config: Config, shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Returns the estimated seconds of an update's phases, without tools and without what Python
    does."""
    width, card = BYTES[config.model.dtype], plan.card
    prompt, rest = _path_tokens(config)
    rows = _rows(config, plan)
    step = decode_bytes(shape, rows, prompt + rest / 2, width) / card.bandwidth / DECODE_SHARE
    leaves = config.explore.num_leaves * config.run.tasks_per_update
    rounds = math.ceil(leaves / (rows * plan.num_gpus))
    unique = _tree_tokens(config)[0] * config.run.tasks_per_update
    token = forward_flops(shape, (prompt + rest) / 2, SAMPLED_FRAC)
    forward = unique * token / plan.num_gpus / card.flops
    phases = {
        "sampling": rounds * SAMPLED_FRAC * rest * step,
        "forward and backward": 3 * forward * config.learn.num_epochs / LEARN_SHARE,
    }
    is_one_step = config.learn.num_minibatches * config.learn.num_epochs == 1
    if config.loss.old_logprobs == "learner" and not is_one_step:
        # All but the first mini-batch is scored once more.
        share = 1 - 1 / config.learn.num_minibatches if config.learn.num_epochs == 1 else 1.0
        phases["old log-probabilities"] = share * forward / FORWARD_SHARE
    if config.loss.kl_coef > 0:
        phases["reference"] = forward / FORWARD_SHARE
    return phases


def _advice(config: Config, shape: ModelShape, plan: Plan, free: float) -> str:
    """What would make it fit, largest part first."""
    parts = gpu_parts(config, shape, plan)
    ways = []
    if not config.model.gradient_checkpointing:
        ways.append("model.gradient_checkpointing=true")
    per_token = parts["activations"] / config.learn.max_pack_tokens
    longest = sum(_path_tokens(config))
    wanted = int((parts["activations"] + min(free, 0.0) - 1e9) / per_token) // 1024 * 1024
    if config.model.gradient_checkpointing and wanted >= longest:
        ways.append(f"learn.max_pack_tokens={wanted}")
    if config.model.dtype == "float32":
        ways.append("model.dtype=bfloat16")
    if not config.model.lora.rank:
        ways.append("model.lora.rank=16")
    fewest = next(
        (
            count
            for count in (2, 4, 8, 16, 32, 64)
            if count > plan.num_gpus
            and _free(config, shape, Plan(num_gpus=count, card=plan.card)) > 0
        ),
        None,
    )
    if fewest is not None:
        ways.append(f"{fewest} such GPUs")
    return f"Change: {'; or '.join(ways)}" if ways else "Take a smaller model or a larger card"


def _free(config: Config, shape: ModelShape, plan: Plan) -> float:
    return plan.card.memory - sum(gpu_parts(config, shape, plan).values())


def sizing(config: Config, shape: ModelShape | None, plan: Plan) -> Iterator[Finding]:
    """Yields memory by part, keys and values, and time by phase; the verdict of the memory is bad
    where it cannot fit."""
    if shape is None:
        note = f"the shape of '{config.model.path}' is not known here: it has not been fetched yet"
        yield Finding("each GPU", "unknown", note=note, is_doubtful=True)
        return
    card, one = plan.card, kv_bytes(shape, BYTES[config.model.dtype])
    said = f"{plan.num_gpus} x {card.name} of {gigabytes(card.memory)}"
    yield Finding("GPUs", said, note="an estimate; nothing of it was measured on such cards")
    for name, size in gpu_parts(config, shape, plan).items():
        yield Finding(name, gigabytes(size))
    free, wanted = _free(config, shape, plan), _kv_wanted(config, shape, plan)
    tokens, longest = free / one, sum(_path_tokens(config))
    if tokens < longest:
        short = gigabytes(longest * one - free)
        note = f"{short} short of one path of {longest:,} tokens. "
        note += _advice(config, shape, plan, free - longest * one)
        yield Finding("keys and values", "do not fit", False, note)
        return
    enough = free >= wanted
    note = f"room for {tokens:,.0f} tokens"
    if not enough:
        note += (
            f"; {_rows(config, plan)} rows of {longest:,} tokens are {gigabytes(wanted)}: fewer run"
            " at once"
        )
    yield Finding(
        "keys and values", gigabytes(min(free, wanted)), note=note, is_doubtful=not enough
    )
    yield from _time(config, shape, plan)


def _time(config: Config, shape: ModelShape, plan: Plan) -> Iterator[Finding]:
    unique, apart = (size * config.run.tasks_per_update for size in _tree_tokens(config))
    note = f"{apart / unique:.2f} times as many apart; if every path is as long as it may be"
    yield Finding("unique tokens an update", f"{unique / 1e6:.2f} M", note=note)
    phases = seconds_by_phase(config, shape, plan)
    for name, seconds in phases.items():
        share = seconds / sum(phases.values())
        yield Finding(f"time: {name}", f"{seconds:,.0f} s", note=f"{share:.0%}, without tools")
