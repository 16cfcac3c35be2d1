"""Exact entropies in the workers of vLLM's V2 runner: one launch a step, beside those of its own
sampler.

A reply has, of each token, its own log-probability and those of the most likely ones. The first of
these, which nobody reads then, becomes the entropy, under a token id that no other entry has.
Written against vLLM 0.32; compiled for cards, computed by Triton's interpreter, never run on a GPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

BLOCK = 4096
"""Logits that a program reads at once; two passes over a row."""
_scores = sampler.compute_topk_scores


# Triton reads annotations as names of its own.
@triton.jit  # type: ignore[untyped-decorator]
def entropy_kernel(found, found_stride, logits, stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """H = ln Z - sum_v e_v s_v / Z with s = logits - max, e = exp(s), Z = sum_v e_v, a row a
    program, in float32."""
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        read = logits + row * stride + first + inside
        value = tl.load(read, mask=first + inside < size, other=float("-inf"))
        peaks = tl.maximum(peaks, value.to(tl.float32))
    peak = tl.max(peaks)
    weights = tl.zeros([BLOCK], tl.float32)
    moments = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        read = logits + row * stride + first + inside
        value = tl.load(read, mask=first + inside < size, other=float("-inf"))
        shifted = value.to(tl.float32) - peak
        weight = tl.exp(shifted)
        weights += weight
        # What a filter has left out is -inf, and 0 times that is no number.
        moments += tl.where(weight > 0, weight * shifted, 0.0)
    total = tl.sum(weights)
    tl.store(found + row * found_stride, tl.log(total) - tl.sum(moments) / total)


def scores_with_entropies(logits: Tensor, num_logprobs: int, *rest: Any, **options: Any) -> Any:
    """Returns what vLLM's function of this place does, with entropies in column 1 if there are
    two or more."""
    found = _scores(logits, num_logprobs, *rest, **options)
    if num_logprobs > 1 and len(logits):
        column = found.logprobs[:, 1]
        arguments = (column, column.stride(0), logits, logits.stride(0), logits.shape[1])
        entropy_kernel[(len(logits),)](*arguments, BLOCK=BLOCK)
        # A reply is a table by token, in which an entry would go under another of the same token:
        # the drawn one, or the second likeliest.
        ids = found.logprob_token_ids
        is_taken = [(ids[:, 0] == token) | (ids[:, 2] == token) for token in (0, 1)]
        ids[:, 1] = is_taken[0] * (1 + is_taken[1].int())
    return found


def measure() -> None:
    """Has this process's samplers report entropies."""
    sampler.compute_topk_scores = scores_with_entropies
    rejection_sampler.compute_topk_scores = scores_with_entropies
