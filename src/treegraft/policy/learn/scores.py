"""Log-probabilities and entropies of a batch's unique sampled tokens, without ever holding all
logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from treegraft.core.errors import ModelError
from treegraft.policy.attention_hook import ATTENTION, structure_problem, tree_attention
from treegraft.policy.learn.flex import prove_flex
from treegraft.policy.learn.pack import Node, PackedTree, TreeBatch, columns_of
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.policy.output_head import OutputHead, base_model, decoder, first_line, head_problem
from treegraft.policy.shapes import VOCAB_CHUNK

Scores = tuple[Tensor, Tensor]


def check_head(model: nn.Module) -> None:
    """Raises ModelError for a model whose logits cannot be had from hidden states and output
    embeddings."""
    # With our attention in place the model cannot be run plainly, and has been checked before.
    is_checked = base_model(model).config._attn_implementation == ATTENTION
    if not is_checked and (problem := head_problem(model)):
        raise ModelError(
            f"learner: this model cannot be trained here: {problem}; its head has a tail that is"
            " not known yet",
            code="model-not-trainable",
        )


def packed_hidden(model: nn.Module, batch: TreeBatch) -> Tensor:
    """Returns [U + L, width], the hidden state that predicts each sampled token and then each
    imitated token, of one packed pass, for which our attention is installed."""
    hidden = _states(model, PackedPlan(batch))
    sources = batch.sources
    if batch.imitated is not None:
        sources = torch.cat([sources, batch.imitated.sources])
    # Selected before the head: prompts and tool results are most of a pack, and their logits would
    # be thrown away.
    return hidden.index_select(0, sources)


def _states(model: nn.Module, plan: PackedPlan) -> Tensor:
    """[tokens, width] of a batch, padding included."""
    token_ids, position_ids = plan.inputs
    output = decoder(model)(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        attention_plan=plan,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def chunked_scores(
    head: OutputHead, hidden: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
) -> Scores:
    """Returns (logprobs, entropies) of `targets` [rows], float32; the logits of at most `chunk`
    rows exist at once.

    Logits that fit stay for the backward pass, in the model's type; else each chunk's are
    computed again there.
    """
    parts = []
    for rows, wanted, scale in zip(
        hidden.split(chunk), targets.split(chunk), temperatures.split(chunk), strict=True
    ):
        # A single chunk's logits may stay for the backward pass; those of several would add up.
        if len(rows) < len(hidden) and hidden.requires_grad:
            parts.append(checkpoint(_scores, head, rows, wanted, scale, use_reentrant=False))
        else:
            parts.append(_scores(head, rows, wanted, scale))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _scores(head: OutputHead, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Scores:
    found: Scores = _TokenScores.apply(head(hidden), targets, temperatures)  # type: ignore[no-untyped-call]
    return found


class _TokenScores(torch.autograd.Function):
    """(log p_y, H) by rows, for p = softmax(z), z = logits / T, from the logits as they came and
    one number a row.

    log p_y = z_y - lse,   H = lse - Σ_v p_v z_v
    ∂ log p_y / ∂z_v = δ_vy - p_v,   ∂H / ∂z_v = -p_v (log p_v + H)

    A few rows at a time: on a CPU their float32 copies stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> Scores:
        columns = []
        for part, wanted, scale in _few_rows(logits, targets[:, None], temperatures[:, None]):
            z = part.float() / scale
            peak = z.amax(dim=-1, keepdim=True)
            # Shifted, so that no exponential overflows; both results are the same for any shift.
            z -= peak
            own = z.gather(1, wanted)
            weights = z.exp()
            total = weights.sum(dim=-1, keepdim=True)
            log_total = total.log()
            moment = weights.mul_(z).sum(dim=-1, keepdim=True)
            columns.append(
                torch.cat([own - log_total, log_total - moment / total, peak + log_total], dim=-1)
            )
        logprobs, entropies, lse = torch.cat(columns).unbind(dim=-1)
        # The logits themselves and one number a row, instead of probabilities in float32: at a
        # vocabulary of 150k that is what a pack's memory goes to.
        ctx.save_for_backward(logits, targets, temperatures, entropies, lse)
        # So that a gradient that nobody needs comes as None, and its term is not computed.
        ctx.set_materialize_grads(False)
        return logprobs.contiguous(), entropies.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Probabilities are formed again from the logits and one number a row.
        logits, targets, temperatures, entropies, lse = ctx.saved_tensors
        none = torch.zeros_like(lse)
        upstream = [none if grad is None else grad for grad in grads]
        result = torch.empty_like(logits)
        columns = (column[:, None] for column in (*upstream, targets, temperatures, entropies, lse))
        for part, out, of_logprob, of_entropy, wanted, scale, entropy, lse_ in _few_rows(
            logits, result, *columns
        ):
            log_p = (part.float() / scale).sub_(lse_)
            found = log_p.exp()
            # Without an entropy bonus nothing has a term in them.
            if grads[1] is None:
                found.mul_(-of_logprob)
            else:
                found.mul_(log_p.add_(entropy).mul_(-of_entropy).sub_(of_logprob))
            out.copy_(found.scatter_add_(1, wanted, of_logprob).div_(scale))
        return result, None, None


_CACHED = 1 << 20
_ROOMY = 1 << 27
"""Logits that are worked on in float32 at once on a CPU, and elsewhere."""


def _few_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the same few rows of all."""
    count = max(1, (_CACHED if logits.device.type == "cpu" else _ROOMY) // logits.shape[-1])
    return zip(*(tensor.split(count) for tensor in (logits, *others)), strict=True)


def rowwise_hidden(model: nn.Module, batch: TreeBatch) -> Tensor:
    """Returns the same as `packed_hidden` from one plain forward pass per trajectory, or row of
    one, for models that cannot be packed.

    A token that trajectories share is taken from one of them: its prefix, and so its gradient, is
    the same in all.
    """
    device = batch.token_ids.device
    place = torch.zeros_like(batch.sampled)
    hidden: list[Tensor] = []
    count = 0
    numbers = torch.arange(len(place), device=device)
    for path, own in zip(batch.paths, batch.per_trajectory(numbers), strict=True):
        states: dict[str, Tensor] = {}
        for row in path.rows():
            ids = torch.tensor([row.path.token_ids], device=device)
            found = decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
            # The state before a token predicts it; a path's first token is never sampled.
            found = torch.cat([found[:1], found[:-1]])
            parts = found.split([step.num_tokens for step in row.path.steps])
            for step, part in list(zip(row.path.steps, parts, strict=True))[row.num_shared :]:
                states[step.id] = part[
                    torch.tensor(step.sampled_mask.tolist(), dtype=torch.bool, device=device)
                ]
        # In time, as its contributions are.
        hidden += [states[step.id] for step in path.steps]
        place[own] = torch.arange(count, count + len(own), device=device)
        count += len(own)
    return torch.cat(hidden).index_select(0, place)


@torch.no_grad()
def packing_problem(model: nn.Module) -> str | None:
    """Returns why this model's attention cannot run on packed trees, or None where it can.

    Our attention is tried on two branches over one prefix: every layer has to call it, and the
    hidden states have to equal those of plain forward passes of the branches. Where it is installed
    already, it has been tried.
    """
    inner = base_model(model)
    if inner.config._attn_implementation == ATTENTION:
        return None
    config = inner.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        value.get("rope_type") for value in rope.values() if isinstance(value, dict)
    }
    # The probe below is too short to show it.
    if kinds & {"dynamic", "longrope"}:
        return (
            f"its position scaling ({', '.join(sorted(kind for kind in kinds if kind))}) depends on"
            " the whole sequence's length"
        )
    device = inner.device
    # A prompt of four tokens with two branches of three; ids apart from each other, so that a
    # mixed-up token shows.
    ids = (torch.arange(10, device=device) * 7 + 3) % config.vocab_size
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5, 6], device=device)
    paths = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8, 9]], device=device)
    tree = PackedTree(0, 10, (Node(0, 4, 10), Node(4, 7, 7), Node(7, 10, 10)))
    columns: dict[str, Any] = dict.fromkeys(columns_of(TreeBatch), torch.zeros(0, dtype=torch.long))
    columns |= {"token_ids": ids, "position_ids": positions}
    batch = TreeBatch(**columns, trees=(tree,), paths=())
    plan = PackedPlan(batch)
    states = []
    for path in paths:
        states.append(decoder(model)(input_ids=ids[path][None], use_cache=False).last_hidden_state)
    plain = torch.cat(states)
    try:
        with tree_attention(model):
            packed = _states(model, plan)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"its layers do not take our attention ({first_line(error)})"
    if problem := structure_problem(model, plan.num_calls):
        return problem
    gap = float((packed[paths] - plain).abs().max())
    # Of the largest state: models differ by orders of magnitude in the size of theirs.
    scale = max(1.0, float(plain[0].abs().max()))
    limit = (1e-4 if inner.dtype == torch.float32 else 0.1) * scale
    # Asked this way round, so that NaN is a problem.
    if gap <= limit:
        return None
    return f"packed hidden states differ from plain ones by up to {gap:.3g}"


class ScoringModel(nn.Module):
    """A model as one module whose forward pass returns scores.

    All that touches weights runs in it, so that weights which are sharded by layer are gathered for
    it and their gradients summed after it.
    """

    def __init__(
        self, model: Any, *, is_packed: bool = True, vocab_chunk: int = VOCAB_CHUNK
    ) -> None:
        """Takes over `model`.

        Args:
            is_packed: False runs trees row by row.
            vocab_chunk: positions whose logits exist at once.
        """
        super().__init__()
        self.model = model
        inner = base_model(model)
        # Of divided weights, which have no place yet, `ShardedLearner` does so.
        if is_packed and inner.device.type == "cuda":
            prove_flex(inner.config.get_text_config(), inner.dtype, inner.device)
        self._chunk = vocab_chunk
        self._is_packed = is_packed
        self._head = OutputHead(model)

    def forward(self, batch: TreeBatch, *, takes_imitated: bool = False) -> Scores:
        """Returns (logprobs, entropies) of the unique sampled tokens and, with `takes_imitated`,
        of the imitated tokens after them."""
        places = batch.sampled
        temperatures = batch.temperatures
        if takes_imitated and batch.imitated is not None:
            places = torch.cat([places, batch.imitated.packed])
            temperatures = torch.cat([temperatures, batch.imitated.temperatures])
        hidden_of = packed_hidden if self._is_packed else rowwise_hidden
        hidden = hidden_of(self.model, batch)[: places.numel()]
        targets = batch.token_ids[places]
        return chunked_scores(self._head, hidden, targets, temperatures, self._chunk)


def token_scores(model: nn.Module, batch: TreeBatch, *, vocab_chunk: int = VOCAB_CHUNK) -> Scores:
    """Returns (logprobs, entropies), each [U] float32, of the batch's unique sampled tokens in the
    order of `batch.sampled`.

    Both are of softmax(logits / T) with T of the token's step. Our attention is installed for the
    call and the model's own restored after it; a model that cannot take it is run once per
    trajectory. Gradients flow to the model, except under its own gradient checkpointing, for which
    the attention of `Learner` stays installed.

    Raises:
        ModelError: its logits cannot be had from hidden states and output embeddings.
    """
    check_head(model)
    if packing_problem(model) is not None:
        return ScoringModel(model, is_packed=False, vocab_chunk=vocab_chunk).forward(batch)
    with tree_attention(model):
        return ScoringModel(model, vocab_chunk=vocab_chunk).forward(batch)
