"""The memory of each GPU, and the split of an update's time, for a recipe on cards that need not be
here: estimates from the model's shape and a card's data sheet.

One GPU that learns and samples in one process holds

    weights N·b, engine's copy N·b, masters and their gradients 4 T each, AdamW 8 T,
    the bfloat16 gradient of one tensor (they move to the masters as they are made)

R ranks share masters, gradients and AdamW's moments, 16 T / R bytes each, or in the hosts' memory
(`learn.offload`); two layers are gathered at a time, for the pass and ahead of it. The native
engine is rank 0's. A server holds N·b, divided among its GPUs, and takes the share of each that
vLLM is told, keys and values being what is left of it.
Activations of a pack of t tokens, with k kept numbers a token and layer:

    checkpointing   n · t · h · b + t · k · b        (one layer's are computed again at a time)
    without         n · t · k · b,                   k = 3 i + 2 q + 8 h

with n layers of width h, i of the feed-forward part and q of all query heads. The native engine's
keys and values get the rest of the memory. With `engine.vllm.sleep` a server and what passes take
beside it are never there at once: the smaller of the two takes no room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treegraft import Config, SettingError, load_config
from treegraft.extras.lab.layout import Layout, ServerOptions
from treegraft.extras.lab.memory import one_process
from treegraft.extras.lab.roofline import CARDS, Card, decode_bytes, forward_flops, known_card
from treegraft.extras.lab.shape import model_shape
from treegraft.extras.lab.text import BYTES, PROMPT_TOKENS, gigabytes, ranges
from treegraft.parts import Finding, Machine, errors, shapes

RESERVED = shapes.ModelShape.RESERVED
DECODE_SHARE, FORWARD_SHARE, LEARN_SHARE = 0.6, 0.5, 0.37
"""Assumed shares of the card's bandwidth in sampling, and of its operations in passes without and
with gradients. Assumptions, not measurements."""
PASSING = ("gathered layers", "activations", "logits")
"""Parts of a learner that are there while it learns, and go before servers come back."""
NOT_AT_ONCE = "never there at once"
SAMPLED_FRAC, BRANCH_FRAC = 0.6, 0.5
"""Assumed shares: of sampled tokens on a path behind its prompt; of a path that a branch adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a recipe is to run."""

    num_gpus: int
    card: Card
    num_starts: int | None = None
    """First-level rollouts of a tree; None for as many as leaves."""

    @classmethod
    def of(cls, num_gpus: int, card: str) -> Plan:
        """Returns the plan for cards by name, as in "A100", or in "A100:40" for those with another
        memory, in 10^9 bytes.

        Raises:
            SettingError: the card is not known, or the memory is no number above 0.
        """
        name, colon, size = card.partition(":")
        found = {one.lower(): found for one, found in CARDS.items()}.get(name.lower())
        if found is None or (colon and not (size.isascii() and size.isdigit() and int(size))):
            raise SettingError(
                f"--gpu: got '{card}', expected one of {', '.join(CARDS)}; for another card take"
                f" the nearest with its memory in GB, as in {name if found else 'H100'}:96",
                code="unknown-card",
            )
        memory = int(size) * 1e9 if colon else found.memory
        return cls(num_gpus=num_gpus, card=replace(found, memory=memory))

    @classmethod
    def here(cls, config: Config, gpus: Sequence[str]) -> Plan | None:
        """Returns the plan for this machine's GPUs, as their driver names them; None where one
        process needs one at most, or where there are none whose data sheet is known."""
        if not gpus or (config.learn.ranks in ("auto", 1) and config.engine.kind != "vllm"):
            return None
        name, _, memory = gpus[0].rpartition(",")
        found = known_card(name)
        if found is None:
            return None
        # As the driver says it: "81559 MiB".
        size = int(memory.split()[0]) * 2.0**20
        return cls(num_gpus=len(gpus), card=replace(found, memory=size))


def host_bytes(config: Config, shape: shapes.ModelShape, ranks: int) -> float:
    """Returns the bytes of the shards of all ranks in their hosts' memory, 0 where they lie on the
    GPUs."""
    if not config.learn.offload or ranks == 1:
        return 0.0
    trained, copies = shape.num_trained(config), config.learn.replicate
    frozen = (shape.num_weights - trained) * BYTES[config.model.dtype]
    return copies * (16.0 * trained + (frozen if config.model.lora.rank else 0))


def server_bytes(config: Config, shape: shapes.ModelShape, plan: Plan, num_gpus: int) -> float:
    """Returns the bytes that a server on `num_gpus` takes of each: weights, keys and values, and
    what it reserves."""
    options = ServerOptions.of(config)
    if options.share is not None:
        return options.share * plan.card.memory
    weights = shape.num_weights * BYTES[config.model.dtype] / _parallel(config, num_gpus)
    return weights + options.cache + RESERVED


def _parallel(config: Config, num_gpus: int) -> int:
    return min(num_gpus, ServerOptions.of(config).tensor_parallel)


def gpu_parts(
    config: Config, shape: shapes.ModelShape, plan: Plan, gpu: int = 0
) -> dict[str, float]:
    """Returns the bytes of each part on a GPU, without the native engine's keys and values."""
    layout = Layout.of(config, plan.num_gpus)
    parts = shape.learner_parts(config, layout.ranks) if gpu < layout.ranks else {}
    if layout.is_native:
        own = {"engine's weights": float(shape.num_weights * BYTES[config.model.dtype])}
        return own | parts if gpu == 0 else parts
    taken = sum(server_bytes(config, shape, plan, len(own)) for own in layout.servers if gpu in own)
    passing = sum(parts.get(name, 0.0) for name in PASSING)
    if taken and passing and config.engine.vllm.sleep:
        # What the driver and the server's programs take stays.
        parts = parts | {NOT_AT_ONCE: -min(passing, taken - RESERVED)}
    return parts | ({"server": taken} if taken else {})


def _path_tokens(config: Config) -> tuple[int, int]:
    """(prompt, rest) of the longest path."""
    rest = config.rollout.max_completion_tokens
    if config.model.path == "tiny":
        return max(1, config.model.tiny.max_context - rest), rest
    return PROMPT_TOKENS, rest


def _tree_tokens(config: Config, plan: Plan) -> tuple[float, float]:
    """Tokens of a tree of longest paths: (unique, those of its trajectories apart)."""
    prompt, rest = _path_tokens(config)
    leaves = config.explore.num_leaves
    starts = min(plan.num_starts or leaves, leaves)
    return (
        prompt + (starts + BRANCH_FRAC * (leaves - starts)) * rest,
        float(leaves * (prompt + rest)),
    )


def _kv_wanted(config: Config, shape: shapes.ModelShape, plan: Plan) -> float:
    """Bytes of keys and values that let every row of an engine run at its longest path."""
    rows, tokens = _rows(config, plan), sum(_path_tokens(config))
    return rows * tokens * shape.kv_bytes(BYTES[config.model.dtype])


def _kv_free(config: Config, shape: shapes.ModelShape, plan: Plan) -> float:
    """Bytes that an engine has for keys and values, on all its GPUs."""
    layout = Layout.of(config, plan.num_gpus)
    if layout.is_native:
        return _free(config, shape, plan, 0)
    count = len(layout.servers[0])
    each = server_bytes(config, shape, plan, count) - RESERVED
    used = _parallel(config, count)
    return used * each - shape.num_weights * BYTES[config.model.dtype]


def _num_engines(config: Config, plan: Plan) -> int:
    vllm = config.engine.vllm
    return max(1, len(vllm.servers) or len(Layout.of(config, plan.num_gpus).servers))


def _rows(config: Config, plan: Plan) -> int:
    leaves = config.explore.num_leaves * config.run.tasks_per_update
    return min(config.engine.max_rows, math.ceil(leaves / _num_engines(config, plan)))


def seconds_by_phase(config: Config, shape: shapes.ModelShape, plan: Plan) -> dict[str, float]:
    """Returns the estimated seconds of an update's phases, without tools and without what Python
    does."""
    width, card = BYTES[config.model.dtype], plan.card
    prompt, rest = _path_tokens(config)
    rows = _rows(config, plan)
    step = decode_bytes(shape, rows, prompt + rest / 2, width) / card.bandwidth / DECODE_SHARE
    leaves = config.explore.num_leaves * config.run.tasks_per_update
    rounds = math.ceil(leaves / (rows * _num_engines(config, plan)))
    unique = _tree_tokens(config, plan)[0] * config.run.tasks_per_update
    token = forward_flops(shape, (prompt + rest) / 2, SAMPLED_FRAC)
    forward = unique * token / Layout.of(config, plan.num_gpus).ranks / card.flops
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


def _advice(config: Config, shape: shapes.ModelShape, plan: Plan, gpu: int, free: float) -> str:
    """What would make a GPU's parts fit, largest part first; `free` bytes are left, below 0."""
    layout, parts, ways = Layout.of(config, plan.num_gpus), gpu_parts(config, shape, plan, gpu), []
    sleeps = config.engine.vllm.sleep
    left_out = ("server", NOT_AT_ONCE, *(PASSING if sleeps else ()))
    others = sum(size for name, size in parts.items() if name not in left_out)
    room = plan.card.memory - others
    smallest = shape.num_weights * BYTES[config.model.dtype] + RESERVED
    count = layout.num_servers_on(gpu)
    if "server" in parts and room > count * smallest:
        share = math.floor(100 * room / plan.card.memory / count) / 100
        ways.append(f'engine.vllm.server_args=["--gpu-memory-utilization","{share:g}"]')
    if "server" in parts and "activations" in parts and not sleeps:
        ways.append("engine.vllm.sleep=true")
    if "activations" in parts:
        ways += _smaller_learner(config, parts, free)
    if not config.learn.offload and layout.ranks > 1 and gpu < layout.ranks:
        ways.append("learn.offload=true")
    # Each by itself, as it is to be typed; where none is enough, all of them.
    ways = [way for way in ways if _fits(load_config(config, [way]), shape, plan)] or ways
    fewest = next(
        (
            count
            for count in (2, 4, 8, 16, 32, 64)
            if count > plan.num_gpus and _fits(config, shape, replace(plan, num_gpus=count))
        ),
        None,
    )
    if fewest is not None:
        ways.append(f"{fewest} such GPUs")
    return f"Change: {'; or '.join(ways)}" if ways else "Take a smaller model or a larger card"


def _smaller_learner(config: Config, parts: dict[str, float], free: float) -> Iterator[str]:
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    per_token = parts["activations"] / config.learn.max_pack_tokens
    longest = sum(_path_tokens(config))
    wanted = int((parts["activations"] + min(free, 0.0) - 1e9) / per_token) // 1024 * 1024
    if config.model.gradient_checkpointing and wanted >= longest:
        yield f"learn.max_pack_tokens={wanted}"
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if not config.model.lora.rank:
        yield "model.lora.rank=16"


def _free(config: Config, shape: shapes.ModelShape, plan: Plan, gpu: int) -> float:
    return plan.card.memory - sum(gpu_parts(config, shape, plan, gpu).values())


def _fits(config: Config, shape: shapes.ModelShape, plan: Plan) -> bool:
    path = sum(_path_tokens(config)) * shape.kv_bytes(BYTES[config.model.dtype])
    layout = Layout.of(config, plan.num_gpus)
    frees = [_free(config, shape, plan, alike[0]) for alike in layout.kinds().values()]
    has_room = not layout.servers or _kv_free(config, shape, plan) > path
    return not layout.problem(config) and min(frees) >= 0 and has_room


def memory(config: Config, machine: Machine) -> list[Finding]:
    """Returns the section "memory" of `treegraft doctor` for the GPUs of --gpus, else for those of
    this machine; for one process where it needs one at most.

    Raises:
        SettingError: the card of --gpu is not known.
    """
    try:
        shape = model_shape(config, machine.num_words)
    # The latter where a package that reads the weights is not installed.
    except (errors.ModelError, SettingError) as error:
        return [Finding("model.path", config.model.path, False, str(error))]
    return memory_of(config, machine, shape)


def memory_of(config: Config, machine: Machine, shape: shapes.ModelShape | None) -> list[Finding]:
    """Returns `memory` of a model of this shape; None: it is not known."""
    if machine.num_gpus is None:
        plan = Plan.here(config, machine.gpus)
    else:
        plan = Plan.of(machine.num_gpus, machine.gpu)
    if plan is None:
        return one_process(config, machine, shape)
    return list(sizing(config, shape, replace(plan, num_starts=machine.num_starts)))


def sizing(config: Config, shape: shapes.ModelShape | None, plan: Plan) -> Iterator[Finding]:
    """Yields memory by part for each kind of GPU, keys and values, and time by phase; what cannot
    fit is bad."""
    if shape is None:
        note = f"the shape of '{config.model.path}' is not known here: it has not been fetched yet"
        yield Finding("each GPU", "unknown", note=note, is_doubtful=True)
        return
    card, layout = plan.card, Layout.of(config, plan.num_gpus)
    said = f"{plan.num_gpus} x {card.name} of {gigabytes(card.memory)}"
    yield Finding("GPUs", said, note="an estimate; nothing of it was measured on such cards")
    if problem := layout.problem(config):
        yield Finding("layout", "cannot be", False, problem)
        return
    kinds = layout.kinds()
    for holds, numbers in kinds.items():
        yield from _memory(config, shape, plan, numbers, holds, is_only=len(kinds) == 1)
    if size := host_bytes(config, shape, layout.ranks):
        note = "learn.offload: weights, gradients and moments of all ranks, on all hosts together"
        yield Finding("hosts' memory", gigabytes(size), note=note)
    verdict = _keys_and_values(config, shape, plan)
    yield verdict
    if verdict.is_good:
        yield from _time(config, shape, plan)


def _memory(
    config: Config,
    shape: shapes.ModelShape,
    plan: Plan,
    alike: list[int],
    holds: str,
    *,
    is_only: bool,
) -> Iterator[Finding]:
    """The parts of GPUs that hold the same, and whether they fit."""
    where = f"GPU{'s' if len(alike) > 1 else ''} {ranges(alike)}"
    yield Finding(where, holds, is_doubtful=holds == "nothing")
    for name, size in gpu_parts(config, shape, plan, alike[0]).items():
        yield Finding(name if is_only else f"{where}: {name}", gigabytes(size))
    if Layout.of(config, plan.num_gpus).is_native and alike[0] == 0:
        return  # the rest is for keys and values, which have a line of their own
    free = _free(config, shape, plan, alike[0])
    name = "left" if is_only else f"{where}: left"
    if free >= 0:
        yield Finding(name, gigabytes(free))
    else:
        note = f"{gigabytes(-free)} more than the card has. "
        note += _advice(config, shape, plan, alike[0], free)
        yield Finding(name, "does not fit", False, note)


def _keys_and_values(config: Config, shape: shapes.ModelShape, plan: Plan) -> Finding:
    """Room for them in an engine, against what its rows want; bad where one path does not fit."""
    one, longest = shape.kv_bytes(BYTES[config.model.dtype]), sum(_path_tokens(config))
    if not Layout.of(config, plan.num_gpus).servers:
        note = "in servers that run already; not known here"
        return Finding("keys and values", "elsewhere", note=note)
    free, wanted = _kv_free(config, shape, plan), _kv_wanted(config, shape, plan)
    tokens = free / one
    if tokens < longest:
        short = longest * one - free
        note = f"{gigabytes(short)} short of one path of {longest:,} tokens. "
        gpu = Layout.of(config, plan.num_gpus).servers[0][0]
        note += _advice(config, shape, plan, gpu, -short)
        return Finding("keys and values", "do not fit", False, note)
    note = f"room for {tokens:,.0f} tokens"
    if config.engine.kind == "vllm":
        note += " in each server"
    if free < wanted:
        note += (
            f"; {_rows(config, plan)} rows of {longest:,} tokens are {gigabytes(wanted)}: fewer run"
            " at once"
        )
    value = gigabytes(min(free, wanted))
    return Finding("keys and values", value, note=note, is_doubtful=free < wanted)


def _time(config: Config, shape: shapes.ModelShape, plan: Plan) -> Iterator[Finding]:
    unique, apart = (size * config.run.tasks_per_update for size in _tree_tokens(config, plan))
    note = f"{apart / unique:.2f} times as many apart; if every path is as long as it may be"
    yield Finding("unique tokens an update", f"{unique / 1e6:.2f} M", note=note)
    phases = seconds_by_phase(config, shape, plan)
    for name, seconds in phases.items():
        share = seconds / sum(phases.values())
        yield Finding(f"time: {name}", f"{seconds:,.0f} s", note=f"{share:.0%}, without tools")
