"""What runs inside the workers of a vLLM server: who it is, whose it is, and the exchange of
weights.

It runs with the server's packages, so it uses torch, safetensors and our own pure functions alone.
Both of vLLM's runners call it; `draw` is for the former one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm import __version__ as vllm_version

from treegraft.core.registry import EXTRAS
from treegraft.policy.engine.sampling import draws_of_sampling
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.protocol import PLUGIN_VERSION
from treegraft.policy.weights import bit_sum, fingerprint_of


class Extension:
    """Methods of a server's workers that `/collective_rpc` calls; JSON in, JSON out."""

    model_runner: Any
    reload_weights: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _owner: tuple[str, float] | None = None
    _pipe: Any = None

    def treegraft_identity(self) -> dict[str, Any]:
        """Returns what a client compares with its own: versions, model, limits, draws."""
        model = self.vllm_config.model_config
        text, kinds = model.hf_text_config, type(self.model_runner).__mro__
        return {
            "runner": 1 + any(one.__module__.startswith("vllm.v1.worker.gpu.") for one in kinds),
            "gpu": str(torch.cuda.get_device_properties(self.device).uuid)
            if self.device.type == "cuda"
            else "",
            "workers": self.vllm_config.parallel_config.world_size,
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

    def treegraft_measure(self) -> dict[str, Any]:
        """Has vLLM's V2 runner report exact entropies; see the extension `entropies`."""
        importlib.import_module(f"{EXTRAS}.entropies.kernel").measure()
        return {}

    def treegraft_load(self, path: str) -> dict[str, Any]:
        """Takes over the weights of a folder; returns their checksum as read."""
        return self._take((name, tensor.to(self.device)) for name, tensor in WeightsFolder(path))

    def treegraft_join(
        self, host: str, port: int, size: int, kind: str, timeout_s: float
    ) -> dict[str, Any]:
        """Meets the run that sends weights; see the extension `memory`."""
        # By name: the core does not know extensions.
        make = importlib.import_module(f"{EXTRAS}.memory.pipe").Pipe
        self._pipe = None
        pipe = make(host, port, 1 + self.rank, size, kind, timeout_s)
        pipe.meet()
        self._pipe = pipe
        return {}

    def treegraft_receive(self) -> dict[str, Any]:
        """Takes over the weights of the next publish through the pipe; returns their checksum."""
        # Taken out: after a fault the next publish needs another one.
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            raise RuntimeError("no pipe: treegraft_join comes first")
        found = self._take(pipe.receive(self.device))
        self._pipe = pipe
        return found

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        sums: dict[str, tuple[str, tuple[int, ...], int]] = {}

        def seen() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                # Where it lies: a GPU sums what takes a processor a minute.
                sums[name] = (str(tensor.dtype), tuple(tensor.shape), int(bit_sum(tensor)))
                yield name, tensor

        self.reload_weights(weights_iterator=seen())
        return {"fingerprint": fingerprint_of(sums)}
