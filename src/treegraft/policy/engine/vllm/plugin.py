"""What runs inside a vLLM server: the draw by our own sampling, and the exchange of weights.

The only module that imports vllm. It runs with the server's packages, so it uses torch, safetensors
and our own pure functions alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from treegraft.core.interfaces import NoiseKey
from treegraft.core.types import NO_FILTERS, Filters
from treegraft.policy.engine.filters import filtered
from treegraft.policy.engine.sampling import Columns, draws_of_sampling, sample_tokens
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.protocol import (
    DRAW,
    PLUGIN_VERSION,
    marked_rows,
)
from treegraft.policy.weights import bit_sum, fingerprint_of


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

    def _drawn(self, logits: Tensor, orders: Sequence[Order]) -> Columns:
        return sample_tokens(
            logits,
            [one.temperature for one in orders],
            [one.noise_key for one in orders],
            [one.position for one in orders],
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits with the rows of our requests replaced."""
        if not self._orders:
            return logits
        rows = sorted(self._orders)
        orders = [self._orders[row] for row in rows]
        own = logits if len(rows) == logits.shape[0] else logits[rows]
        tokens, logprobs, entropies = self._drawn(own, orders)
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


class Extension:
    """Methods of a server's workers that `/collective_rpc` calls; JSON in, JSON out."""

    model_runner: Any
    vllm_config: VllmConfig
    _owner: tuple[str, float] | None = None

    def treegraft_identity(self) -> dict[str, Any]:
        """Returns what a client compares with its own: versions, model, limits, draws."""
        model = self.vllm_config.model_config
        text = model.hf_text_config
        return {
            "plugin": PLUGIN_VERSION,
            "vllm": str(vllm_version),
            "torch": str(torch.__version__),
            "draws": draws_of_sampling(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "model_type": text.model_type,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "max_context": model.max_model_len,
            "max_rows": self.vllm_config.scheduler_config.max_num_seqs,
            "max_logprobs": model.max_logprobs,
            "logprobs_mode": str(model.logprobs_mode),
            "draws_here": any(
                str(one).split(":")[-1].endswith("Draw") for one in model.logits_processors or ()
            ),
        }

    def treegraft_claim(self, owner: str, lease_s: float, instead_of: str) -> dict[str, Any]:
        """Makes `owner` the one run that may publish here, for `lease_s` seconds from now; returns
        the owner that holds the server.

        Args:
            instead_of: an owner that is known to have ended; "" for none.
        """
        now = time.monotonic()
        if self._owner is None or self._owner[0] in (owner, instead_of) or self._owner[1] < now:
            self._owner = (owner, now + lease_s)
        return {"owner": self._owner[0], "for_s": self._owner[1] - now}

    def treegraft_release(self, owner: str) -> dict[str, Any]:
        """Gives the server up where `owner` holds it."""
        if self._owner is not None and self._owner[0] == owner:
            self._owner = None
        return {}

    def treegraft_load(self, path: str) -> dict[str, Any]:
        """Takes over the weights of a folder; returns their checksum as read, and the seconds."""
        began = time.perf_counter()
        sums: dict[str, tuple[str, tuple[int, ...], int]] = {}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in WeightsFolder(path):
                sums[name] = (str(tensor.dtype), tuple(tensor.shape), int(bit_sum(tensor)))
                yield name, tensor

        self.model_runner.reload_weights(weights_iterator=tensors())
        return {"fingerprint": fingerprint_of(sums), "seconds": time.perf_counter() - began}
