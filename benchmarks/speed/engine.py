"""Sampling: the native engine, with exact entropies, against transformers' generate, vLLM's server,
and the products alone.

A group shares one prompt. A tree is ARPO's: starts that call a tool, wait for it, read its result
and go on, and branches beside them. Both engines meet the same lengths and waits; end tokens are
ignored, so that all sample the same number of tokens.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.speed.measure import Case, Row, Side, alternate, speed_row, time_row
from benchmarks.speed.peers import VllmServer
from benchmarks.speed.plans import TreePlan, arpo_tree, grow_plan
from benchmarks.speed.stage import OurEngine, Stage
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, Sampling
from treegraft.policy.engine.forward import FusedForward, build_forward, model_kernels
from treegraft.policy.engine.packed import Product, SeparateLinears, product_kind
from treegraft.policy.output_head import base_model, decoder

PROMPT = 200
TOKENS = 128
GROUPS = (16, 64)
ROWS = (1, 4, 8, 16, 64, 256)


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed engine`."""
    groups: dict[str, Case] = {
        f"group {rows}": partial(_group, stage, rows) for rows in stage.pick(GROUPS, (3, 5))
    }
    trees: dict[str, Case] = {
        f"tree {num}": partial(_tree, stage, num) for num in stage.pick((1, 4), (1,))
    }
    products: dict[str, Case] = {
        f"products {rows}": partial(_products, stage, rows) for rows in stage.pick(ROWS, (1, 17))
    }
    return {**groups, **trees, "limit": partial(_limit, stage), **products}


# ---------------------------------------------------------------------- a group over one prompt


def _group(stage: Stage, rows: int) -> Iterator[Row]:
    """Sampling for one prompt, against both peers in one run."""
    prompt = stage.pick(PROMPT, 20)
    tokens = stage.pick(TOKENS, 8)
    with ExitStack() as stack:
        ours = stack.enter_context(stage.engine())
        server = stack.enter_context(stage.vllm())
        sides = {
            "ours": Side(
                lambda run: ours.group(stage.prompt(run, prompt), rows, tokens, run),
                after=lambda run, found: ours.check(stage.prompt(run, prompt), found, tokens),
            ),
            "generate": Side(lambda run: _generate(stage, stage.prompt(run, prompt), rows, tokens)),
        }
        if server is not None:
            sides["vllm"] = _vllm_side(
                server,
                ours.runner,
                lambda run: server.complete([stage.prompt(run, prompt)] * rows, tokens),
            )
        seconds = alternate(sides, stage.num_runs)
        if server is not None:
            ours.runner.run(_released(server))
        stage.say(
            f"   log-probabilities and entropies differ from plain passes by {ours.worst_gap:.4f}"
            " nats in the mean at most"
        )
    what = f"sampling, {prompt}-token prompt shared by {rows}, {tokens} new tokens"
    amount = float(rows * tokens)
    yield speed_row(
        what, "transformers generate", seconds["ours"], seconds["generate"], amount, "tokens/s"
    )
    if "vllm" in seconds:
        yield speed_row(
            what,
            "vLLM CPU server, prefix caching",
            seconds["ours"],
            seconds["vllm"],
            amount,
            "tokens/s",
        )


@torch.inference_mode()
def _generate(stage: Stage, prompt: Sequence[int], rows: int, tokens: int) -> None:
    """transformers' generate with its dynamic cache, which gives no log-probabilities or entropies
    here."""
    model = stage.reference
    ids = torch.tensor([prompt] * rows, device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
    )
    assert out.shape == (rows, len(prompt) + tokens), f"generate gave {tuple(out.shape)}"


def _vllm_side(
    server: VllmServer, runner: asyncio.Runner, work: Callable[[int], Awaitable[Any]]
) -> Side:
    """A side that lets the server go on for its turn only."""

    async def awaited(run: int) -> Any:
        return await work(run)

    return Side(
        lambda run: runner.run(awaited(run)),
        before=lambda _: server.resume(),
        after=lambda run, found: server.pause(),
    )


async def _released(server: VllmServer) -> None:
    server.resume()
    await server.disconnect()


# ---------------------------------------------------------------------- a tree that waits for tools


def _tree(stage: Stage, num_trees: int) -> Iterator[Row]:
    """Trees at once, against the same leaves sampled apart and against vLLM."""
    length = stage.pick(PROMPT, 20)
    small = arpo_tree(num_starts=2, num_leaves=4, tokens=(3, 6), result=(2, 4), wait_s=(0.0, 0.01))
    plan = stage.pick(arpo_tree(), small)
    flat = plan.apart()
    with ExitStack() as stack:
        ours = stack.enter_context(stage.engine())
        server = stack.enter_context(stage.vllm())
        sides = {
            "tree": _our_side(stage, ours, plan, num_trees, length, "tree"),
            "apart": _our_side(stage, ours, flat, num_trees, length, "apart"),
        }
        if server is not None:

            async def complete(
                prefix: Sequence[int], count: int, key: tuple[int | str, ...]
            ) -> Sequence[int]:
                return (await server.complete([prefix], count))[0]

            def grow(run: int) -> Awaitable[int]:
                return _grow(
                    complete,
                    plan,
                    [stage.prompt(run * 8 + n, length) for n in range(num_trees)],
                    run,
                )

            sides["vllm"] = _vllm_side(server, ours.runner, grow)
        seconds = alternate(sides, stage.num_runs)
        if server is not None:
            ours.runner.run(_released(server))
        stage.say(
            f"   log-probabilities and entropies differ from plain passes by {ours.worst_gap:.4f}"
            " nats in the mean at most"
        )
    yield from _tree_rows(plan, flat, num_trees, length, seconds)


def _tree_rows(
    plan: TreePlan, flat: TreePlan, num_trees: int, length: int, seconds: Mapping[str, list[float]]
) -> Iterator[Row]:
    several = "an ARPO tree" if num_trees == 1 else f"{num_trees} ARPO trees at once"
    what = (
        f"{several} of {len(plan.starts)} starts, {plan.num_leaves} leaves, {plan.num_steps} steps"
        " with tool waits"
    )
    yield time_row(
        what, "the same leaves sampled apart on our engine", seconds["tree"], seconds["apart"]
    )
    unique = length + plan.num_tokens
    apart = length + flat.num_tokens
    cost = statistics.median(seconds["tree"]) / statistics.median(seconds["apart"])
    share = unique / apart
    yield Row(
        what=f"{several}: its share of the time of leaves sampled apart",
        against=f"its share of their tokens, {unique} of {apart}, the prompt counted once in both",
        ratio=cost / share,
        ours=cost,
        theirs=share,
        unit="share (ratio: the goal is at most 1.15)",
        num_runs=len(seconds["tree"]),
    )
    if "vllm" in seconds:
        yield time_row(what, "vLLM CPU server, prefix caching", seconds["tree"], seconds["vllm"])


def _our_side(
    stage: Stage, ours: OurEngine, plan: TreePlan, num_trees: int, length: int, name: str
) -> Side:
    seen: list[tuple[list[int], Completion]] = []

    async def complete(
        prefix: Sequence[int], count: int, key: tuple[int | str, ...]
    ) -> Sequence[int]:
        completion = await ours.engine.complete(
            Request(prefix, Sampling(max_new_tokens=count), noise_key=("bench", name, *key))
        )
        seen.append((list(prefix), completion))
        return completion.token_ids

    def work(run: int) -> int:
        seen.clear()
        prompts = [stage.prompt(run * 8 + n, length) for n in range(num_trees)]

        async def grow() -> int:
            return await _grow(complete, plan, prompts, run)

        return ours.runner.run(grow())

    def after(run: int, counted: int) -> None:
        longest = max(seen, key=lambda pair: len(pair[0]))
        ours.worst_gap = max(ours.worst_gap, *(stage.check(*pair) for pair in (seen[0], longest)))

    return Side(work, after=after)


async def _grow(
    complete: Callable[[Sequence[int], int, tuple[int | str, ...]], Awaitable[Sequence[int]]],
    plan: TreePlan,
    prompts: Sequence[Sequence[int]],
    run: int,
) -> int:
    """Grows a tree on each prompt, all at once; returns how many tokens were sampled, which have to
    be the plan's."""
    counts = await asyncio.gather(
        *(grow_plan(complete, plan, prompt, (run, n)) for n, prompt in enumerate(prompts))
    )
    assert set(counts) == {plan.num_sampled}, (
        f"a tree of {plan.num_sampled} sampled tokens has {counts}"
    )
    return sum(counts)


# ---------------------------------------------------------------------- how far it is to the limit


def _limit(stage: Stage) -> Iterator[Row]:
    """A step of a large group against the time of its matrix products alone."""
    prompt = stage.pick(PROMPT, 20)
    tokens = stage.pick(TOKENS, 8)
    rows = stage.pick(64, 4)
    products = MatrixProducts(stage.load()[0], rows)
    with stage.engine() as ours:
        sides = {
            "ours": Side(
                lambda run: ours.group(stage.prompt(run, prompt), rows, tokens, run),
                after=lambda run, found: ours.check(stage.prompt(run, prompt), found, tokens),
            ),
            "products": Side(lambda _: [products() for _ in range(tokens)] and None),
        }
        seconds = alternate(sides, stage.num_runs)
    step, floor = (
        1000 * statistics.median(seconds[name]) / tokens for name in ("ours", "products")
    )
    yield Row(
        what=f"distance to the limit: a step of {rows} rows, prompt and sampling included",
        against="the matrix products of the step alone, weights laid out",
        ratio=floor / step,
        ours=step,
        theirs=floor,
        unit="ms (ratio: the goal is at least 0.55)",
        num_runs=stage.num_runs,
    )


def _products(stage: Stage, rows: int) -> Iterator[Row]:
    """Our products against the matrix library's, for every linear layer of the model in turn."""
    model = stage.load()[0]
    ours = product_kind(model, model_kernels(model))
    if ours is SeparateLinears:
        stage.note("left out: no products of ours for this processor and type")
        return
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    inputs = {
        width: torch.randn(rows, width).to(model.dtype)
        for width in {linear.in_features for linear in linears}
    }

    def side(kind: Callable[..., Product]) -> Side:
        products = [(kind(linear), inputs[linear.in_features]) for linear in linears]

        @torch.inference_mode()
        def work(_: int) -> None:
            for product, values in products:
                product(values)

        return Side(work)

    seconds = alternate({"ours": side(ours), "library": side(SeparateLinears)}, stage.num_runs)
    yield time_row(
        f"the model's matrix products, {rows} rows, {stage.dtype}",
        "the matrix library, torch.nn.Linear",
        *seconds.values(),
    )


class MatrixProducts:
    """The matrix products of one decoding step, head included, one after the other, and nothing
    else."""

    def __init__(self, model: Any, rows: int) -> None:
        """Takes over `model`; its products are fused and laid out as the engine's are."""
        forward, problem = build_forward(model)
        assert forward is not None, problem
        head = model.get_output_embeddings()
        if isinstance(forward, FusedForward):
            products: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
                (head, head.in_features)
            ]
            for own, layer in zip(forward.layers, decoder(model).layers, strict=True):
                attention = layer.self_attn
                mlp = layer.mlp
                firsts = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
                for product, first in zip(own.products, firsts, strict=True):
                    products.append((product, first.in_features))
        else:
            products = [
                (layer, layer.in_features)
                for layer in base_model(model).modules()
                if isinstance(layer, nn.Linear)
            ]
        self._work = [
            (product, torch.randn(rows, width).to(head.weight)) for product, width in products
        ]

    @torch.inference_mode()
    def __call__(self) -> None:
        for product, values in self._work:
            product(values)
