"""The engine's own kernels (engine.c) on a CPU, called through ctypes.

Without a compiler, or if the compiled kernels compute wrong numbers, the engine runs on torch's
operators, with a notice.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch import Tensor

from treegraft.core.errors import KernelError
from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.kernels.library import (
    FLOAT,
    LONG,
    POINTER,
    address,
    declared,
    head_rows,
    load_library,
)
from treegraft.policy.noise import philox_gumbels

_log = logging.getLogger(__name__)

BLOCK = 64
"""Positions of one block of keys and values."""
DRAWN = 256
"""Tokens of one block of the vocabulary."""
LANES = 16
_NONE = (None, None)


def padded_width(width: int) -> int:
    """Returns the width that a value takes in a block."""
    return -(-width // LANES) * LANES


class Pass(ctypes.Structure):
    """The arguments that all layers of one forward pass share; the arrays must outlive it."""

    _fields_ = (
        ("table", POINTER),
        ("table_width", LONG),
        ("rows", POINTER),
        ("positions", POINTER),
        ("tokens", LONG),
        ("heads", LONG),
        ("kv_heads", LONG),
        ("threads", LONG),
    )


class Kernels:
    """The compiled functions for one head width and element type. They raise `ValueError` for a
    tensor of another type or shape, see `address`."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        """Raises `KernelError` where they cannot be compiled or loaded."""
        library, self.num_threads = load_library("engine", width, dtype)
        self._width = width
        self._dtype = dtype
        batch = ctypes.POINTER(Pass)
        rows = (POINTER, LONG, LONG)
        self._store = declared(library.tg_store, batch, *rows * 3, *[POINTER] * 4)
        self._attend = declared(
            library.tg_attend, batch, *rows, *[POINTER] * 3, FLOAT, LONG, FLOAT, POINTER
        )
        self._norm = declared(library.tg_norm, *[POINTER] * 4, *[LONG] * 4, FLOAT, LONG)
        self._gate = declared(library.tg_gate, *[POINTER] * 3, *[LONG] * 4)
        self._blocks = declared(library.tg_blocks, POINTER, LONG, LONG, *[POINTER] * 4, LONG)
        self._gumbels = declared(library.tg_gumbels, *[POINTER] * 2, *[LONG] * 3)
        self._lay_out = declared(library.tg_lay_out, *[POINTER] * 2, *[LONG] * 3)
        self._product = declared(library.tg_product, POINTER, LONG, *[POINTER] * 3, *[LONG] * 4)
        self.product_step: int = declared(library.tg_product_step, returns=LONG)()
        """The number of inputs of a product has to be a multiple of this; 0 where there are no
        products for this processor."""

    def batch(
        self, table: Tensor, rows: Tensor, positions: Tensor, heads: int, kv_heads: int
    ) -> Pass:
        """Returns what all layers of a pass share, for int32 tensors that must outlive it: the
        block numbers [paths, blocks] of each path, and of each token its path (-1 for padding) and
        its position."""
        at = [address(x, torch.int32, rows.shape) for x in (rows, positions)]
        first = address(table, torch.int32, table.shape)
        shape = (len(rows), heads, kv_heads, self.num_threads())
        return Pass(first, table.shape[1], *at, *shape)

    def store(
        self,
        batch: Pass,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Puts key and value [heads, tokens, width] into their blocks; with cosines and sines,
        float32 [tokens, width], rotates them and (in place) the query first."""
        shape = (batch.tokens, self._width)
        own, others = ((heads, *shape) for heads in (batch.heads, batch.kv_heads))
        tables = [x if x is None else address(x, torch.float32, shape) for x in rotation or _NONE]
        rows = [head_rows(x, self._dtype, others) for x in (key, value)]
        first = head_rows(query, self._dtype, own)
        self._store(batch, *first, *rows[0], *rows[1], *tables, *self._at(batch, keys, values))

    def attend(
        self, batch: Pass, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns attention [tokens, heads, width] of query [heads, tokens, width] over the paths'
        blocks; padding rows are 0."""
        out = query.new_empty(batch.tokens, batch.heads, self._width)
        # In a variable of its own: a temporary tensor would be freed while the kernel reads it.
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        rows = head_rows(query, self._dtype, (batch.heads, batch.tokens, self._width))
        rules = (options.scaling, options.window or 0, options.softcap or 0.0)
        last = None if sinks is None else address(sinks, torch.float32, (batch.heads,))
        at = (*self._at(batch, keys, values), out.data_ptr())
        self._attend(batch, *rows, *at, *rules, last)
        return out

    def _at(self, batch: Pass, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """Where a layer's blocks lie."""
        count = len(keys)
        heads = batch.kv_heads
        width = self._width
        first = address(keys, self._dtype, (count, heads, width, BLOCK))
        return first, address(values, self._dtype, (count, heads, BLOCK, padded_width(width)))

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Returns rms-normalised x [rows, size] times weight; `added` is first added to x in
        place."""
        rows, size = x.shape
        # Not in place: the caller goes on with x, the residual.
        out = x.new_empty(rows, size)
        plus = None if added is None else address(added, self._dtype, x.shape)
        scale = address(weight, self._dtype, (size,))
        at = (address(x, self._dtype, x.shape), plus, scale, out.data_ptr())
        self._norm(*at, rows, 1, size, size, eps, self.num_threads())
        return out

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Rms-normalises x [tokens, heads, width], heads contiguous, over the width in place."""
        tokens, heads, width = x.shape
        here = address(x, self._dtype, x.shape, (width, 1))
        at = (here, None, address(weight, self._dtype, (width,)), here)
        self._norm(*at, tokens, heads, x.stride(0), width, eps, self.num_threads())

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up for [rows, size] of equal strides."""
        (rows, size), stride = gate.shape, gate.stride(0)
        out = gate.new_empty(rows, size)
        at = [address(x, self._dtype, gate.shape, (stride, 1)) for x in (gate, up)]
        self._gate(*at, out.data_ptr(), rows, stride, size, self.num_threads())
        return out

    def blocks(self, logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, float32, for logits l [rows, vocabulary] and temperatures T [rows], with s = l /
        T - max:

        the largest l [rows], Σ exp(s) by blocks of 256 tokens [rows, blocks], Σ s exp(s) [rows].
        """
        rows, size = logits.shape
        shapes = ((rows,), (rows, -(-size // DRAWN)), (rows,))
        peaks, sums, moments = (logits.new_empty(shape, dtype=torch.float32) for shape in shapes)
        at = (peaks.data_ptr(), sums.data_ptr(), moments.data_ptr())
        first = address(logits, self._dtype, logits.shape)
        scale = address(temperatures, torch.float32, (rows,))
        self._blocks(first, rows, size, scale, *at, self.num_threads())
        return peaks, sums, moments

    def gumbels(self, draws: Tensor, size: int) -> Tensor:
        """The result of `philox_gumbels`, within 1 unit of the last place."""
        draws = draws.contiguous()
        # Not of torch's default type, which another thread may change at any time.
        out = draws.new_empty(len(draws), size, dtype=torch.float32)
        at = (address(draws, torch.int64, (len(draws), 3)), out.data_ptr())
        self._gumbels(*at, *out.shape, self.num_threads())
        return out

    def lay_out(self, weight: Tensor) -> Tensor:
        """Returns a weight [outputs, inputs] as `product` reads it."""
        # Padded to whole vectors of outputs, so that the product needs no rest of its own.
        outputs, inputs = weight.shape
        weight, to = weight.contiguous(), weight.new_empty(padded_width(outputs), inputs)
        first = address(weight, self._dtype, weight.shape)
        self._lay_out(first, to.data_ptr(), inputs, outputs, self.num_threads())
        return to

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """Returns rows · weightᵀ + bias, [rows, outputs]; a row's bits do not depend on the rows
        beside it."""
        out = rows.new_empty(rows.shape[0], outputs)
        first = address(rows, self._dtype, rows.shape, (1,))
        laid_out = address(weight, self._dtype, (padded_width(outputs), rows.shape[1]))
        added = None if bias is None else address(bias, self._dtype, (outputs,))
        at = (first, rows.stride(0), laid_out, added, out.data_ptr())
        self._product(*at, *rows.shape, outputs, self.num_threads())
        return out


def kernels_for(width: int, dtype: torch.dtype, device: str) -> Kernels | None:
    """Returns the kernels for heads of `width`; None where there are none (another device or type)
    or they cannot be made."""
    # In bfloat16 two elements are read as one word, so an odd width has no layout.
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16) or width % 2:
        return None
    return _kernels(width, dtype)


@functools.cache
def _kernels(width: int, dtype: torch.dtype) -> Kernels | None:
    try:
        kernels = Kernels(width, dtype)
        _prove_noise(kernels)
    except KernelError as error:
        _log.warning("engine: running on torch's operators alone, which is slower: %s", error)
        return None
    return kernels


def _prove_noise(kernels: Kernels) -> None:
    # Here, since a forward pass, on which the others are tried, has no noise.
    draws = torch.tensor([(0, 0, 0), (0x243F6A88, 0x85A308D3, 2**31), (1, 2, -1)])
    ours = kernels.gumbels(draws, 99)
    plain = philox_gumbels(draws, 99)
    if not torch.allclose(ours, plain, rtol=1e-6, atol=1e-12):
        raise KernelError(
            f"the noise differs from torch's by up to {float((ours - plain).abs().max()):.3g}",
            code="kernel-noise-differs",
        )
