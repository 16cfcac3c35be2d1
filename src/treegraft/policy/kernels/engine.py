"""The engine's own kernels (engine.c) on a CPU, called through ctypes.

Where there is no compiler, or what it made does not compute what it should, the engine runs on
torch's operators, with a notice.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from treegraft.core.errors import KernelError
from treegraft.policy.kernels.library import ThreadCount, load_library

_log = logging.getLogger(__name__)

BLOCK = 64
"""Positions of one block of keys and values."""
DRAWN = 256
"""Tokens of one block of the vocabulary."""
LANES = 16
_long, _float, _pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def padded_width(width: int) -> int:
    """Returns the width that a value takes in a block."""
    return -(-width // LANES) * LANES


class Pass(ctypes.Structure):
    """What all layers of one forward pass have in common; the arrays must outlive it."""

    _fields_ = (
        ("table", _pointer),
        ("table_width", _long),
        ("rows", _pointer),
        ("positions", _pointer),
        ("tokens", _long),
        ("heads", _long),
        ("kv_heads", _long),
        ("threads", _long),
    )


class Kernels:
    """The compiled functions for one head width and element type. Tensors must be on the CPU, rows
    of the last axis contiguous."""

    def __init__(self, library: ctypes.CDLL, num_threads: ThreadCount) -> None:
        self.num_threads = num_threads
        pass_type = ctypes.POINTER(Pass)
        rows = (_pointer, _long, _long)
        self._store, self._attend = library.tg_store, library.tg_attend
        self._norm, self._gate = library.tg_norm, library.tg_gate
        self._store.argtypes = (
            pass_type,
            *rows,
            *rows,
            *rows,
            _pointer,
            _pointer,
            _pointer,
            _pointer,
        )
        self._attend.argtypes = (
            pass_type,
            *rows,
            _pointer,
            _pointer,
            _pointer,
            _float,
            _long,
            _float,
            _pointer,
        )
        self._norm.argtypes = (
            _pointer,
            _pointer,
            _pointer,
            _pointer,
            _long,
            _long,
            _long,
            _long,
            _float,
            _long,
        )
        self._gate.argtypes = (_pointer, _pointer, _pointer, _long, _long, _long, _long)
        self._blocks = library.tg_blocks
        self._blocks.argtypes = (
            _pointer,
            _long,
            _long,
            _pointer,
            _pointer,
            _pointer,
            _pointer,
            _long,
        )
        self._lay_out, self._product = library.tg_lay_out, library.tg_product
        self._lay_out.argtypes = (_pointer, _pointer, _long, _long, _long)
        self._product.argtypes = (
            _pointer,
            _long,
            _pointer,
            _pointer,
            _pointer,
            _long,
            _long,
            _long,
            _long,
        )
        for function in (
            self._store,
            self._attend,
            self._norm,
            self._gate,
            self._blocks,
            self._lay_out,
            self._product,
        ):
            function.restype = None
        library.tg_product_step.restype = _long
        self.product_step: int = library.tg_product_step()
        """What the number of inputs of a product has to be a multiple of; 0 where there are no
        products for this processor."""

    def store(
        self,
        batch: Pass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Puts key and value [heads, tokens, width] into their blocks; with cosines and sines,
        float32 [tokens, width], rotates them and (in place) the query first."""
        cosines, sines = (
            (None, None) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())
        )
        self._store(
            batch,
            *_rows(query),
            *_rows(key),
            *_rows(value),
            cosines,
            sines,
            keys.data_ptr(),
            values.data_ptr(),
        )

    def attend(
        self,
        batch: Pass,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns attention [tokens, heads, width] of query [heads, tokens, width] over the paths'
        blocks; padding rows are 0."""
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        floats = None if sinks is None else sinks.detach().float().contiguous()
        at = None if floats is None else floats.data_ptr()
        self._attend(
            batch,
            *_rows(query),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            scaling,
            window or 0,
            softcap or 0.0,
            at,
        )
        return out

    def norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Returns rms-normalised x [rows, size] times weight; `added` is first added to x in
        place."""
        out = torch.empty_like(x)
        plus = None if added is None else added.data_ptr()
        rows, size = x.shape
        self._norm(
            x.data_ptr(),
            plus,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            1,
            x.stride(0),
            size,
            eps,
            self.num_threads(),
        )
        return out

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Rms-normalises x [tokens, heads, width], heads contiguous, over the width in place."""
        tokens, heads, width = x.shape
        at = x.data_ptr()
        self._norm(
            at,
            None,
            weight.data_ptr(),
            at,
            tokens,
            heads,
            x.stride(0),
            width,
            eps,
            self.num_threads(),
        )

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up for [rows, size] of equal strides."""
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._gate(
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            *gate.shape[:1],
            gate.stride(0),
            gate.shape[1],
            self.num_threads(),
        )
        return out

    def blocks(
        self, logits: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns, float32, for logits l [rows, vocabulary] and temperatures T [rows], with s = l /
        T - max:

        the largest l [rows], Σ exp(s) by blocks of 256 tokens [rows, blocks], Σ s exp(s) [rows].
        """
        rows, size = logits.shape
        shapes = ((rows,), (rows, -(-size // DRAWN)), (rows,))
        peaks, sums, moments = (logits.new_empty(shape, dtype=torch.float32) for shape in shapes)
        at = (peaks.data_ptr(), sums.data_ptr(), moments.data_ptr())
        self._blocks(
            logits.data_ptr(), rows, size, temperatures.data_ptr(), *at, self.num_threads()
        )
        return peaks, sums, moments

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight [outputs, inputs] as `product` reads it."""
        outputs, inputs = weight.shape
        weight, to = weight.contiguous(), weight.new_empty(padded_width(outputs), inputs)
        self._lay_out(weight.data_ptr(), to.data_ptr(), inputs, outputs, self.num_threads())
        return to

    def product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int
    ) -> torch.Tensor:
        """Returns rows · weightᵀ + bias, [rows, outputs]; a row's bits do not depend on the rows
        beside it."""
        out = rows.new_empty(rows.shape[0], outputs)
        added = None if bias is None else bias.data_ptr()
        at = (rows.data_ptr(), rows.stride(0), weight.data_ptr(), added, out.data_ptr())
        self._product(*at, *rows.shape, outputs, self.num_threads())
        return out


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    """Address, step from token to token, step from head to head of [heads, tokens, width]."""
    return x.data_ptr(), x.stride(1), x.stride(0)


def kernels_for(width: int, dtype: torch.dtype, device: str) -> Kernels | None:
    """Returns the kernels for heads of `width`; None where there are none (another device or type)
    or they cannot be made."""
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16) or width % 2:
        return None
    return _kernels(width, dtype)


@functools.cache
def _kernels(width: int, dtype: torch.dtype) -> Kernels | None:
    try:
        return Kernels(*load_library("engine", width, dtype))
    except KernelError as error:
        _log.warning("engine: running on torch's operators alone, which is slower: %s", error)
        return None
