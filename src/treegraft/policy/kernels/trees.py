"""Attention over packed trees by our own kernels (trees.c) on a CPU, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treegraft.policy.deal import deal
from treegraft.policy.kernels.library import (
    FLOAT,
    LONG,
    POINTER,
    address,
    declared,
    head_rows,
    load_library,
)

RUN = 64
"""Most tokens of a node that are taken together as columns."""
MAX_SHARES = 16


class _Plan(ctypes.Structure):
    _fields_ = (
        ("runs", POINTER),
        ("num_runs", LONG),
        ("tokens", LONG),
        ("heads", LONG),
        ("kv_heads", LONG),
        ("shares", LONG),
        ("threads", LONG),
        ("scaling", FLOAT),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("first", POINTER), ("stride", LONG), ("step", LONG))


class TreeRuns:
    """The columns of a batch: every node in runs of at most 64 tokens, dealt out to shares, one for
    each thread and at most 16."""

    def __init__(
        self, nodes: Sequence[tuple[int, int, int]], num_tokens: int, num_threads: int
    ) -> None:
        """Args:
        nodes: (first token, end, end of the subtree) each, in their order.
        """
        runs = []
        for start, end, subtree_end in nodes:
            for at in range(start, end, RUN):
                runs.append((at, min(RUN, end - at), subtree_end))
        self.num_tokens = num_tokens
        self.num_shares = min(num_threads, MAX_SHARES, len(runs))
        owners = deal([count * (end - start) for start, count, end in runs], self.num_shares)
        rows = [(*run, owner) for run, owner in zip(runs, owners, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")


class TreeKernels:
    """The compiled functions for one head width and element type. They raise `ValueError` for a
    tensor of another type or shape, see `address`."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        """Raises `KernelError` where they cannot be compiled or loaded."""
        library, self.num_threads = load_library("trees", width, dtype)
        self._width = width
        self._dtype = dtype
        plan = ctypes.POINTER(_Plan)
        self._forward = declared(
            library.tg_tree_forward, plan, *[_Rows] * 3, *[POINTER] * 2, returns=LONG
        )
        self._backward = declared(
            library.tg_tree_backward,
            plan,
            *[_Rows] * 3,
            *[POINTER] * 2,
            _Rows,
            *[POINTER] * 3,
            returns=LONG,
        )
        self.is_usable = declared(library.tg_tree_step, returns=LONG)() > 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, runs: TreeRuns, scaling: float
    ) -> Tensor:
        """Returns softmax attention [tokens, heads, width]. Gradients are exact; the backward pass
        forms the scores again.

        Args:
            query: [heads, tokens, width]; key and value: [kv heads, tokens, width].
        """
        inputs = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        output: Tensor = _TreeAttention.apply(self, runs, scaling, *inputs)  # type: ignore[no-untyped-call]
        return output

    def forward(
        self, inputs: Sequence[Tensor], runs: TreeRuns, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Returns attention [tokens, heads, width] and log Σ exp(scores) [heads, tokens], float32.

        Raises:
            MemoryError: there is no room for its intermediate results.
        """
        query = inputs[0]
        heads, tokens, width = query.shape
        out = query.new_empty(tokens, heads, width)
        # Kept for the backward pass, which forms the scores again instead of reading them: they
        # would take tokens² of memory.
        lse = query.new_empty(heads, tokens, dtype=torch.float32)
        rows = [self._rows(x, tokens) for x in inputs]
        plan = self._plan(inputs, runs, scaling)
        _check(self._forward(plan, *rows, out.data_ptr(), lse.data_ptr()))
        return out, lse

    def backward(
        self,
        inputs: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        runs: TreeRuns,
        scaling: float,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key and value, shaped as they are, for that of `out`
        [tokens, heads, width].

        Raises:
            MemoryError: there is no room for its intermediate results.
        """
        shape = inputs[0].shape
        grads = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in inputs]
        rows = [self._rows(x, shape[1]) for x in (*inputs, grad.transpose(0, 1))]
        at = (address(out, self._dtype, grad.shape), address(lse, torch.float32, shape[:2]))
        to = [x.data_ptr() for x in grads]
        _check(self._backward(self._plan(inputs, runs, scaling), *rows[:3], *at, rows[3], *to))
        return tuple(x.transpose(0, 1) for x in grads)

    def _rows(self, x: Tensor, tokens: int) -> _Rows:
        return _Rows(*head_rows(x, self._dtype, (len(x), tokens, self._width)))

    def _plan(self, inputs: Sequence[Tensor], runs: TreeRuns, scaling: float) -> _Plan:
        heads = [len(x) for x in inputs]
        tokens = inputs[0].shape[1]
        # The kernels trust the table: with another one they would read beyond the tensors.
        if tokens != runs.num_tokens or heads[1] != heads[2]:
            raise ValueError(
                f"attention: {tokens} tokens and heads {heads} for trees of {runs.num_tokens}"
            )
        first = address(runs.table, torch.int64, (len(runs.table), 4))
        shape = (len(runs.table), tokens, *heads[:2], runs.num_shares, self.num_threads())
        return _Plan(first, *shape, scaling)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: TreeKernels, runs: TreeRuns, scaling: float, *inputs: Tensor
    ) -> Tensor:
        out, lse = kernels.forward(inputs, runs, scaling)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.shared = kernels, runs, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        kernels, runs, scaling = ctx.shared
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return None, None, None, *kernels.backward(inputs, out, lse, grad, runs, scaling)


def _check(has_failed: int) -> None:
    if has_failed:
        raise MemoryError(
            "learner: no memory for attention over a pack; lower learn.max_pack_tokens"
        )
