"""The learner whose weights, gradients and moments are divided among ranks (FSDP2).

Every rank makes the same calls with the same trees. Gradients are summed, never averaged, so the
sum is the same however many ranks there are; only its rounding differs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from treegraft.core.errors import ModelError, SettingError
from treegraft.policy.attention_hook import install_attention
from treegraft.policy.checkpoint import write_model
from treegraft.policy.learn.flex import prove_flex
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.ranks import Ranks
from treegraft.policy.learn.scores import ScoringModel, check_head, packing_problem
from treegraft.policy.load import DTYPES, load_model, with_adapters
from treegraft.policy.output_head import base_model, decoder
from treegraft.policy.shards import local_rows
from treegraft.policy.weights import (
    adapted_modules,
    bit_sum,
    fingerprint_of,
    named_weights,
    weight_names,
)
from treegraft.settings.config import Config

P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(
    method: Callable[Concatenate[ShardedLearner, P], R],
) -> Callable[Concatenate[ShardedLearner, P], R]:
    """Returns a method that every rank has to call, whose failure names the rank that caused
    it."""

    @functools.wraps(method)
    def call(learner: ShardedLearner, /, *args: P.args, **options: P.kwargs) -> R:
        with learner.ranks.blaming():
            return method(learner, *args, **options)

    return call


def build_learner(
    ranks: Ranks,
    config: Config,
    model: Any = None,
    checkpoint: Path | None = None,
) -> ShardedLearner:
    """Returns a learner whose weights are divided among the ranks; each has to call it.

    Args:
        model: on rank 0, whole, with its adapters; it may be dropped afterwards.
        checkpoint: on rank 0: whose optimiser's state to go on from; None for the beginning.

    Raises:
        ModelError: a model that several ranks cannot learn.
        SettingError: LoRA targets that are no linear layers.
        RankError: a rank has ended.
    """
    shape = ""
    if not ranks.rank:
        shape = model_shape(model)
        refuse(model, config)
    place = None if checkpoint is None else str(checkpoint.resolve())
    shape, place = ranks.share((shape, place))
    with ranks.blaming():
        learner = ShardedLearner(ranks, shape, config, source=model)
    if place is not None:
        learner.load(Path(place))
    return learner


def refuse(model: Any, config: Config) -> None:
    """Refuses what one process can learn and several cannot."""
    check_head(model)
    problem = packing_problem(model)
    if problem is not None:
        raise ModelError(
            f"model '{config.model.path}': its trees cannot be packed ({problem}), which several"
            " ranks need; expected a model with plain attention. Train it with one rank.",
            code="trees-not-packed",
        )
    if any("default" not in module.lora_A for module in adapted_modules(model).values()):
        raise SettingError(
            f"model.lora.targets: got {config.model.lora.targets!r}, of which some are no linear"
            " layers; several ranks expect linear layers alone. Leave the others out, or train with"
            " one rank.",
            code="lora-targets-not-linear",
        )


def model_shape(model: Any) -> str:
    """Returns a model's configuration as JSON, from which `meta_model` makes it again."""
    text: str = base_model(model).config.to_json_string(use_diff=False)
    return text


def meta_model(shape: str, config: Config) -> Any:
    """Returns the model of a configuration with its adapters, without memory for weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    data = json.loads(shape)
    if config.model.trust_remote_code:
        # A class of the model's own folder, which AutoConfig.for_model does not know.
        model, _ = load_model(config.model, has_weights=False)
        model.float()
    else:
        kind = data.pop("model_type")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **data), dtype=torch.float32
            )
    with torch.device("meta"):
        return with_adapters(model.eval(), config.model, seed=config.run.seed)


class StreamedWeights:
    """Weights that are divided among ranks as a `WeightSource`: on rank 0, while the other ranks
    `follow`."""

    def __init__(self, learner: ShardedLearner) -> None:
        self._learner = learner
        self.ranks = learner.ranks
        self.names = learner.names
        self.fingerprint = learner.fingerprint()
        """Checksum of all tensors, equal to that of the plain model."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.ranks.share(True)
        stream = self._learner.stream()
        with self.ranks.blaming():
            try:
                # Not `yield from`, which would close the stream with this generator.
                for pair in stream:  # noqa: UP028
                    yield pair
            except GeneratorExit:
                # The others gather every tensor; one left out here would keep them waiting.
                for _ in stream:
                    pass

    def follow(self) -> None:
        """Gathers the weights as often as rank 0 goes through them, until it shares None."""
        while self.ranks.share():
            with self.ranks.blaming():
                for _ in self._learner.stream():
                    pass


class ShardedLearner(Learner):
    """A learner of which each rank has a share."""

    def __init__(
        self,
        ranks: Ranks,
        shape: str,
        config: Config,
        *,
        source: Any = None,
    ) -> None:
        """Takes its rows of rank 0's weights.

        Args:
            shape: of the model, see `model_shape`.
            source: rank 0's whole model with its adapters; None on the others.
        """
        self.ranks = ranks
        self._config = config
        self._source = source
        model = meta_model(shape, config)
        # Tried already by rank 0 on the whole model.
        install_attention(model)
        super().__init__(
            model,
            config.learn,
            config.loss,
            length_constant=config.rollout.max_completion_tokens,
            num_updates=config.run.num_updates,
            team=ranks,
        )
        # Its memory is free now that each rank has its rows.
        self._source = None

    def _placed(self, scoring: ScoringModel) -> ScoringModel:
        ranks = self.ranks
        if ranks.device.type == "cuda":
            config = base_model(scoring.model).config.get_text_config()
            prove_flex(config, self._dtype, ranks.device)
        is_low = self._config.model.dtype != "float32"
        options: dict[str, Any] = {
            "mesh": init_device_mesh(ranks.device.type, (ranks.size,)),
            # The root too, so that between passes every weight is its shard.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._dtype if is_low else None,
                reduce_dtype=torch.float32 if is_low else None,
            ),
        }
        lists = (
            part for part in decoder(scoring.model).children() if isinstance(part, nn.ModuleList)
        )
        for layer in next(lists, ()):
            fully_shard(layer, **options)
        fully_shard(scoring, **options)
        for module in scoring.modules():
            if isinstance(module, FSDPModule):
                # Sums, not means. gloo knows no sum with a factor, so it is forced.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # The shards' memory; tied weights come apart there and are tied again.
        scoring.to_empty(device=ranks.device)
        base_model(scoring.model).tie_weights()
        self._fill(scoring.model)
        return scoring

    @torch.no_grad()
    def _fill(self, model: Any) -> None:
        """Gives every rank its rows of the weights, and all buffers."""
        found = {}
        if self._source is not None:
            found = {**dict(self._source.named_parameters()), **dict(self._source.named_buffers())}
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=self.ranks.device)
            if found:
                whole.copy_(found[name])
            dist.broadcast(whole, 0)
            local, first = local_rows(weight)
            local.copy_(whole if local is weight else whole[first : first + local.shape[0]])

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._config.model.dtype]

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    # ------------------------------------------------------------------ weights

    def weights(self) -> StreamedWeights:
        """Returns the plain model's weights, gathered from the ranks one after another each time
        that rank 0 goes through them."""
        return StreamedWeights(self)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) of the plain model, gathered one after another, in the
        model's type. Every rank has to go through it."""
        dtype = self._dtype
        weights = named_weights(self.model, whole)
        while True:
            # Not around the yield: the reader may be in inference mode, or in another one.
            with torch.inference_mode(False), torch.no_grad():
                pair = next(weights, None)
                if pair is None:
                    return
                name, tensor = pair
                # Cast before it is gathered: half the bytes.
                value = whole(tensor.to(dtype) if tensor.is_floating_point() else tensor)
            yield name, value

    @on_all_ranks
    @torch.inference_mode(False)  # an engine's thread may be in that mode
    @torch.no_grad()
    def fingerprint(self) -> str:
        """Returns the checksum of what `stream` yields, mostly from the shards."""
        dtype = self._dtype
        sums = []
        facts = {}
        for name, tensor in named_weights(self.model, whole):
            value, first = local_rows(tensor)
            # Of what all ranks hold, that of one counts.
            is_counted = isinstance(tensor, DTensor) or self.ranks.rank == 0
            value = value.to(dtype) if value.is_floating_point() else value
            facts[name] = (str(value.dtype), tuple(tensor.shape))
            width = tensor.shape[1:].numel() if first else 0
            total = bit_sum(value, first * width)
            sums.append((total if is_counted else torch.zeros_like(total)).to(self.ranks.device))
        totals = torch.stack(sums)
        dist.all_reduce(totals)
        pairs = zip(facts.items(), totals.tolist(), strict=True)
        return fingerprint_of({name: (*fact, total) for (name, fact), total in pairs})

    @property
    def names(self) -> list[str]:
        """Names of what `stream` yields."""
        return weight_names(self.model)

    # ------------------------------------------------------------------ what every rank calls

    learn = on_all_ranks(Learner.learn)
    imitate = on_all_ranks(Learner.imitate)
    with_logprobs = on_all_ranks(Learner.with_logprobs)
    with_exact_entropies = on_all_ranks(Learner.with_exact_entropies)

    keep_reference = on_all_ranks(Learner.keep_reference)
    save = on_all_ranks(Learner.save)
    load = on_all_ranks(Learner.load)

    def _write_model(self, folder: Path) -> None:
        if self.ranks.rank:
            # Rank 0 gathers each tensor with the help of all.
            for _ in self.stream():
                pass
            return
        write_model(folder, self.model, self.stream())
        # Divided weights are float32, whatever those of the plain model are.
        config = base_model(self.model).config
        config.dtype = self._dtype
        config.save_pretrained(folder)


def whole(tensor: Any) -> Tensor:
    """Returns a tensor's rows of all ranks; every rank has to ask."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found
