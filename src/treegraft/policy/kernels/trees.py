"""Attention over packed trees by our own kernels (trees.c) on a CPU, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from treegraft.core.errors import KernelError
from treegraft.policy.kernels.library import ThreadCount, load_library
from treegraft.policy.learn.dense import PROBE, distance_from_dense, is_exact
from treegraft.policy.learn.pack import Node

_log = logging.getLogger(__name__)

RUN = 64
"""Most tokens of a node that are taken together as columns."""
MAX_SHARES = 16
_long, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Plan(ctypes.Structure):
    _fields_ = (
        ("runs", _pointer),
        ("num_runs", _long),
        ("tokens", _long),
        ("heads", _long),
        ("kv_heads", _long),
        ("shares", _long),
        ("threads", _long),
        ("scaling", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("first", _pointer), ("stride", _long), ("step", _long))


class TreeRuns:
    """The columns of a batch: every node in runs of at most 64 tokens, dealt out to shares, one for
    each thread and at most 16."""

    def __init__(self, nodes: Sequence[Node], num_tokens: int, num_threads: int) -> None:
        """Args:
        nodes: in their order, trees one after another.
        """
        runs = [
            (at, min(RUN, node.end - at), node.subtree_end)
            for node in nodes
            for at in range(node.start, node.end, RUN)
        ]
        self.num_tokens = num_tokens
        self.num_shares = min(num_threads, MAX_SHARES, len(runs))
        loads, owners = [0] * self.num_shares, [0] * len(runs)
        work = [count * (end - start) for start, count, end in runs]
        for index in sorted(range(len(runs)), key=lambda index: -work[index]):
            owners[index] = min(range(self.num_shares), key=loads.__getitem__)
            loads[owners[index]] += work[index]
        rows = [(*run, owner) for run, owner in zip(runs, owners, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")


class TreeKernels:
    """The compiled functions for one head width and element type."""

    def __init__(self, library: ctypes.CDLL, num_threads: ThreadCount) -> None:
        self.num_threads = num_threads
        self._forward, self._backward = library.tg_tree_forward, library.tg_tree_backward
        plan = ctypes.POINTER(_Plan)
        self._forward.argtypes = (plan, _Rows, _Rows, _Rows, _pointer, _pointer)
        self._backward.argtypes = (
            plan,
            _Rows,
            _Rows,
            _Rows,
            _pointer,
            _pointer,
            _Rows,
            _pointer,
            _pointer,
            _pointer,
        )
        library.tg_tree_step.restype = self._forward.restype = self._backward.restype = _long
        self.is_usable = library.tg_tree_step() > 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: TreeRuns,
        scaling: float,
    ) -> torch.Tensor:
        """Returns softmax attention [tokens, heads, width]. Gradients are exact; the backward pass
        forms the scores again.

        Args:
            query: [heads, tokens, width]; key and value: [kv heads, tokens, width].
        """
        output: torch.Tensor = _TreeAttention.apply(query, key, value, self, runs, scaling)  # type: ignore[no-untyped-call]
        return output

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: TreeRuns,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns attention [tokens, heads, width] and log Σ exp(scores) [heads, tokens], float32.

        Raises:
            MemoryError: there is no room for what it needs beside.
        """
        heads, tokens, width = query.shape
        out, lse = (
            query.new_empty(tokens, heads, width),
            query.new_empty(heads, tokens, dtype=torch.float32),
        )
        plan = self._plan(query, key, runs, scaling)
        _check(
            self._forward(
                plan, _rows(query), _rows(key), _rows(value), out.data_ptr(), lse.data_ptr()
            )
        )
        return out, lse

    def backward(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
        runs: TreeRuns,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradients of query, key and value, shaped as they are, for that of `out`
        [tokens, heads, width].

        Raises:
            MemoryError: there is no room for what it needs beside.
        """
        grads = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in inputs]
        rows = [_rows(x) for x in (*inputs, grad.transpose(0, 1))]
        at = [x.data_ptr() for x in (out, lse, *grads)]
        plan = self._plan(inputs[0], inputs[1], runs, scaling)
        _check(self._backward(plan, *rows[:3], *at[:2], rows[3], *at[2:]))
        query_grad, key_grad, value_grad = (x.transpose(0, 1) for x in grads)
        return query_grad, key_grad, value_grad

    def _plan(
        self, query: torch.Tensor, key: torch.Tensor, runs: TreeRuns, scaling: float
    ) -> _Plan:
        if query.shape[1] != runs.num_tokens:
            raise ValueError(f"attention: {query.shape[1]} tokens for trees of {runs.num_tokens}")
        threads = self.num_threads()
        shape = (
            len(runs.table),
            runs.num_tokens,
            query.shape[0],
            key.shape[0],
            runs.num_shares,
            threads,
        )
        return _Plan(runs.table.data_ptr(), *shape, scaling)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernels: TreeKernels,
        runs: TreeRuns,
        scaling: float,
    ) -> torch.Tensor:
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        out, lse = kernels.forward(query, key, value, runs, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernels, ctx.runs, ctx.scaling = kernels, runs, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return (
            *ctx.kernels.backward(tuple(inputs), out, lse, grad, ctx.runs, ctx.scaling),
            None,
            None,
            None,
        )


def _rows(x: torch.Tensor) -> _Rows:
    """[heads, tokens, width], rows of the last axis contiguous."""
    return _Rows(x.data_ptr(), x.stride(1), x.stride(0))


def _check(has_failed: int) -> None:
    if has_failed:
        raise MemoryError(
            "learner: no memory for attention over a pack; lower learn.max_pack_tokens"
        )


def tree_kernels(width: int, dtype: torch.dtype, device: str) -> TreeKernels | None:
    """Returns the kernels for heads of `width`; None where there are none: another device, type or
    processor, no compiler."""
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16) or width % 2:
        return None
    return _tree_kernels(width, dtype)


@functools.cache
def _tree_kernels(width: int, dtype: torch.dtype) -> TreeKernels | None:
    try:
        kernels = TreeKernels(*load_library("trees", width, dtype))
    except KernelError as error:
        _log.warning(
            "learner: attention over trees takes torch's operators, which is slower: %s", error
        )
        return None
    # One thread of ours is no match for many of torch's.
    if not kernels.is_usable or kernels.num_threads() < torch.get_num_threads():
        return None
    runs = TreeRuns(PROBE.nodes, PROBE.end, kernels.num_threads())

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return kernels.attend(query, key, value, runs, width**-0.5).transpose(0, 1)

    gap = distance_from_dense(attend, width, dtype, torch.device("cpu"))
    if is_exact(gap, dtype):
        return kernels
    _log.warning(
        "learner: attention over trees takes torch's operators, which is slower: our kernels are"
        " off by %.3g",
        gap,
    )
    return None
