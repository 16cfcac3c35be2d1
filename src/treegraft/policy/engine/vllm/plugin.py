"""What runs inside the workers of a vLLM server: who it is, and the loading of weights.

It runs with the server's packages, so it uses torch, safetensors and our own pure functions alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm import __version__ as vllm_version

from treegraft.core.registry import EXTRAS
from treegraft.policy.engine.vllm.folder import read_folder
from treegraft.policy.engine.vllm.replies import PLUGIN_VERSION
from treegraft.policy.weights import bit_sum, fingerprint_of


class Extension:
    """Methods of a server's workers that `/collective_rpc` calls; JSON in, JSON out."""

    model_runner: Any
    reload_weights: Any
    vllm_config: Any
    device: torch.device

    def treegraft_identity(self) -> dict[str, Any]:
        """Returns what a client compares with its own: versions, model, limits."""
        model = self.vllm_config.model_config
        text = model.hf_text_config
        runner = type(self.model_runner).__mro__
        return {
            "plugin": PLUGIN_VERSION,
            "vllm": str(vllm_version),
            "is_v2": any(one.__module__.startswith("vllm.v1.worker.gpu.") for one in runner),
            "dtype": str(model.dtype).removeprefix("torch."),
            "model_type": text.model_type,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "max_context": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "logprobs_mode": str(model.logprobs_mode),
        }

    def treegraft_measure(self) -> dict[str, Any]:
        """Has vLLM's V2 runner report exact entropies; see the extension `entropies`."""
        # By name: the core does not know extensions.
        importlib.import_module(f"{EXTRAS}.entropies.kernel").measure()
        return {}

    def treegraft_load(self, path: str) -> dict[str, Any]:
        """Takes over the weights of a folder; returns their checksum as read."""
        sums: dict[str, tuple[str, tuple[int, ...], int]] = {}

        def seen() -> Iterator[tuple[str, Tensor]]:
            for name, stored in read_folder(path):
                # A GPU sums in moments what a processor needs a minute for.
                tensor = stored.to(self.device)
                sums[name] = (str(tensor.dtype), tuple(tensor.shape), int(bit_sum(tensor)))
                yield name, tensor

        self.reload_weights(weights_iterator=seen())
        return {"fingerprint": fingerprint_of(sums)}
