"""Attention of tokens over the blocks of their paths on a device without our C kernels: where
Triton's kernels prove right, single tokens read the blocks where they lie; all else reads copies.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treegraft.policy.attention_hook import AttentionOptions, merge_partials, partial_attention
from treegraft.policy.kernels.engine import BLOCK
from treegraft.policy.output_head import first_line

_log = logging.getLogger(__name__)

PROBE_LENGTHS = (1, 64, 65, 700, 1100, 1130, 1150, 1300, 1500, 600)
"""Paths that the paged kernels are tried on: within a block, at its end, over several splits."""
NUM_SHARED = 9
"""Blocks that the long ones of them have in common."""
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3}
"""Largest distance from attention over copies that is rounding; bfloat16 has 2e-2."""
Shape = tuple[torch.device, torch.dtype, int, int, int, int, int | None, float | None, bool]
_proofs: dict[Shape, bool] = {}


@dataclass(frozen=True)
class Gathered:
    """R paths of n tokens each, R or n being 1, over B blocks."""

    positions: Tensor
    """[R * n]"""
    blocks: Tensor
    """[R * n] the block that each token goes to."""
    places: Tensor
    """[R * n] its place in there."""
    used: Tensor
    """[R, B] the blocks of each path."""

    @classmethod
    def of(cls, positions: Tensor, used: Tensor) -> Gathered:
        """Returns the plan for tokens at `positions` [R * n] of paths with the blocks `used` [R,
        B]."""
        blocks = used.gather(1, (positions // BLOCK).view(used.shape[0], -1)).flatten()
        return cls(positions, blocks, positions % BLOCK, used)

    def store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts key and value [kv heads, R * n, width] into their blocks."""
        keys[self.blocks, :, :, self.places] = key.transpose(0, 1)
        # Values are padded to whole vector registers; the padding stays 0.
        values[self.blocks, :, self.places, : value.shape[-1]] = value.transpose(0, 1)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [R * n, heads, width] for query [heads, R * n, width]: for single tokens by the
        paged kernels where they have proven right, else over copies."""
        single = self.used.shape[0] == query.shape[1]
        if single and paged_is_right(query, keys, values, options):
            from treegraft.policy.kernels.paged import attend_blocks

            return attend_blocks(query, keys, values, self.used, self.positions, options)
        return self.attend_copies(query, keys, values, options)

    def attend_copies(
        self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """The same over copies of the paths' blocks laid side by side; the query heads of a kv head
        are stacked."""
        heads, count, width = query.shape
        num_paths, kv_heads = self.used.shape[0], keys.shape[1]
        length, group = count // num_paths, heads // kv_heads
        own_keys = keys[self.used].permute(0, 2, 1, 4, 3).reshape(num_paths, kv_heads, -1, width)
        own_values = (
            values[self.used]
            .permute(0, 2, 1, 3, 4)
            .reshape(num_paths, kv_heads, -1, values.shape[-1])[..., :width]
        )
        stacked = query.reshape(kv_heads, group, num_paths, length, width).permute(2, 0, 1, 3, 4)
        # A block's places behind the path's last token hold what an earlier path left there; their
        # columns are larger than every position, so the causal mask hides them too.
        rows = self.positions.view(num_paths, 1, 1, length, 1)
        columns = torch.arange(own_keys.shape[2], device=query.device)
        visible = columns <= rows
        if options.window is not None:
            visible &= rows - columns < options.window
        visible = visible.expand(-1, -1, group, -1, -1).reshape(num_paths, 1, group * length, -1)
        part = partial_attention(
            stacked.reshape(num_paths, kv_heads, -1, width), own_keys, own_values, visible, options
        )
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().view(kv_heads, group, 1).repeat_interleave(length, dim=1)
        merged = merge_partials([part], sinks).reshape(num_paths, kv_heads, group, length, width)
        return merged.permute(0, 3, 1, 2, 4).reshape(count, heads, width)


def has_triton(device: torch.device) -> bool:
    """Returns whether Triton's kernels may be tried on `device`."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def makes_copies(device: torch.device) -> bool:
    """Returns whether single tokens read copies of their blocks, or may do so: as long as no paged
    attention was tried, and once one has failed."""
    tried = [is_right for shape, is_right in _proofs.items() if shape[0] == device]
    return not tried or not all(tried)


def paged_is_right(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
    """Returns whether the paged kernels compute attention of this shape on this device; tried once,
    on paths of random numbers, against attention over copies."""
    if not has_triton(query.device):
        return False
    sizes = (query.shape[0], keys.shape[1], keys.shape[2], values.shape[3])
    rules = (options.window, options.softcap, options.sinks is not None)
    shape = (query.device, query.dtype, *sizes, *rules)
    if shape not in _proofs:
        problem = _problem(query, keys, values, options)
        _proofs[shape] = problem is None
        if problem is not None:
            _log.warning(
                "engine: decoding copies the blocks of every path, which is slower: the paged"
                " kernels %s",
                problem,
            )
    return _proofs[shape]


def _problem(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> str | None:
    """Why the paged kernels are not to be used for attention of this shape; None where they are."""
    device, dtype, (heads, _, width) = query.device, query.dtype, query.shape
    counts = [-(-length // BLOCK) for length in PROBE_LENGTHS]
    used = torch.arange(len(counts) * max(counts)).view(len(counts), -1)
    used[4:8, :NUM_SHARED] = used[4, :NUM_SHARED]
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    own_keys = random(used.numel(), *keys.shape[1:])
    own_values = random(used.numel(), *values.shape[1:])
    positions = torch.tensor(PROBE_LENGTHS) - 1
    plan = Gathered.of(positions.to(device), used.to(device))
    # A window within the paths, whatever the model's own is.
    rules = replace(options, window=None if options.window is None else 300)
    try:
        from treegraft.policy.kernels.paged import attend_blocks

        asked = random(len(counts), heads, width).transpose(0, 1)
        found = attend_blocks(asked, own_keys, own_values, plan.used, plan.positions, rules)
        plain = plan.attend_copies(asked, own_keys, own_values, rules)
        gap = float((found.float() - plain.float()).norm() / plain.float().norm())
    # Of any kind: Triton's compiler and the driver raise errors of their own.
    except Exception as error:
        return f"failed with {type(error).__name__}: {first_line(error)}"
    # Asked this way round, so that NaN is a problem.
    if gap <= LIMITS.get(dtype, 2e-2):
        return None
    return f"differ from it by {gap:.3g} of its length"
