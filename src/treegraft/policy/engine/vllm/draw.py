"""The draw by our own sampling in a vLLM server of the runner before V2, the only one of builds for
CPUs. V2 takes logits processors by another interface, and needs none: it draws by seed, position
and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from treegraft.core.interfaces import NoiseKey
from treegraft.core.types import NO_FILTERS, Filters
from treegraft.policy.engine.filters import filtered
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.engine.vllm.protocol import DRAW, marked_rows


@dataclass(frozen=True, slots=True)
class Order:
    """How one request is to be drawn for."""

    key: tuple[int | str, ...]
    offset: int
    """Position of the request's first token in its completion."""
    temperature: float
    filters: Filters
    prompt: list[int]
    output: list[int]
    """The server's own list, which grows."""

    @property
    def noise_key(self) -> NoiseKey | None:
        return self.key if self.temperature > 0 else None

    @property
    def position(self) -> int:
        return self.offset + len(self.output)


class Draw(LogitsProcessor):  # type: ignore[misc]  # vllm is not installed here
    """Draws as the native engine does, and leaves rows of `protocol.marked_rows`, among which the
    server chooses greedily. No state outlives a request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._orders: dict[int, Order] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses a request whose order cannot be read: an exception while drawing would end the
        server."""
        order = (sampling_params.extra_args or {}).get(DRAW)
        if order is not None:
            try:
                _read(order, [], [])
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{DRAW}: {error!r} in {order!r}") from error

    def is_argmax_invariant(self) -> bool:
        """Returns False: the greedy choice is the draw."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Takes over which request lies in which row."""

        def order_of(
            params: SamplingParams, prompt: list[int] | None, output: list[int]
        ) -> Order | None:
            found = (params.extra_args or {}).get(DRAW)
            return None if found is None else _read(found, prompt or [], output)

        process_dict_updates(self._orders, batch_update, order_of)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits with the rows of our requests replaced."""
        if not self._orders:
            return logits
        rows = sorted(self._orders)
        orders = [self._orders[row] for row in rows]
        own = logits if len(rows) == logits.shape[0] else logits[rows]
        temperatures, keys, positions = zip(
            *((one.temperature, one.noise_key, one.position) for one in orders), strict=True
        )
        tokens, logprobs, entropies = sample_tokens(own, temperatures, keys, positions)
        for row, order in enumerate(orders):
            if order.filters != NO_FILTERS:
                path = [*order.prompt, *order.output]
                left = filtered(own[row], order.temperature, order.filters, path)
                drawn = sample_tokens(left[None], [1.0], [order.noise_key], [order.position])
                for column, value in zip((tokens, logprobs, entropies), drawn, strict=True):
                    column[row] = value[0]
        marked = marked_rows(own, (tokens, logprobs, entropies))
        if own is logits:
            return logits.copy_(marked)
        logits[rows] = marked
        return logits


def _read(order: dict[str, Any], prompt: list[int], output: list[int]) -> Order:
    return Order(
        key=tuple(order["key"]),
        offset=int(order["offset"]),
        temperature=float(order["temperature"]),
        filters=Filters(**order.get("filters", {})),
        prompt=prompt,
        output=output,
    )
