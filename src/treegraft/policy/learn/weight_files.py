"""A model's weights from its files, of which each rank reads its own rows alone: no process and no
host holds the model whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treegraft.core.locate import locate
from treegraft.policy.checkpoint import ADAPTER
from treegraft.policy.load import DTYPES, load_model, with_adapters
from treegraft.policy.output_head import base_model
from treegraft.policy.shapes import PREFIX
from treegraft.policy.shards import TensorFiles
from treegraft.settings.config import Config

_WORDS = 512
"""Vocabulary of the model that is tried in place of the whole one."""


def shardable_files(config: Config, path: str | Path) -> list[Path] | None:
    """Returns the safetensors files from which every rank can read its rows of a model; None where
    rank 0 has to load it whole: for the native engine, which samples there from weights of its own,
    for servers that run already, for adapters, and for models that are not a folder of safetensors
    with the names of their weights in transformers."""
    files = _files(config, path)
    if files is None:
        return None
    settings = config.model.model_copy(update={"path": str(path)})
    model, _ = load_model(settings, vocabulary=[], seed=config.run.seed, has_weights=False)
    shape = model_shape(model)
    # A model without memory is named as the ranks' own are.
    return (
        None
        if WeightFiles(files, shape, config.model.dtype).lacks(meta_model(shape, config))
        else files
    )


def _files(config: Config, path: str | Path) -> list[Path] | None:
    vllm, text = config.engine.vllm, str(path)
    needs_whole = config.engine.kind == "native" or (config.engine.kind == "vllm" and vllm.servers)
    if needs_whole or config.model.lora.rank or config.model.trust_remote_code:
        return None
    if text == "tiny" or text.startswith((PREFIX, "pypi:")):
        return None
    place, gguf = locate(text)
    folder = Path(place)
    if gguf is not None or (folder / ADAPTER).is_dir():
        return None
    return sorted(file.absolute() for file in folder.glob("*.safetensors")) or None


def model_shape(model: Any) -> str:
    """Returns a model's configuration as JSON, from which `meta_model` makes it again."""
    text: str = base_model(model).config.to_json_string(use_diff=False)
    return text


def meta_model(shape: str, config: Config) -> Any:
    """Returns the model of a configuration with its adapters, without memory for weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    data = json.loads(shape)
    if config.model.trust_remote_code:
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


def cut_model(shape: str) -> Any:
    """Returns a small model of random weights that computes as the one of a configuration does: a
    layer of each kind, all widths, few words. It has the other's buffers, too.

    Args:
        shape: the whole configuration as JSON, see `model_shape`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    data = json.loads(shape)
    kinds = data.get("layer_types")
    count = 1 if not kinds else 1 + max(kinds.index(kind) for kind in set(kinds))
    data |= {"num_hidden_layers": count, "vocab_size": min(_WORDS, data["vocab_size"])}
    data |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if kinds:
        data["layer_types"] = kinds[:count]
    # Gemma 4's layers differ in their heads, and the last ones share keys and values.
    if own := data.get("per_layer_config"):
        data["per_layer_config"] = {n: fields for n, fields in own.items() if int(n) < count}
        data["num_kv_shared_layers"] = 0
    kind = data.pop("model_type")
    config = AutoConfig.for_model(kind, **data)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class WeightFiles:
    """Where a rank finds its rows of every weight, and all buffers."""

    def __init__(self, files: list[Path], shape: str, dtype: str) -> None:
        """Opens the files.

        Raises:
            CheckpointError: one cannot be read.
        """
        self._tensors, self._dtype = TensorFiles(files), DTYPES[dtype]
        self._buffers = dict(cut_model(shape).named_buffers())

    def lacks(self, model: nn.Module) -> list[str]:
        """Returns the weights and buffers of `model` that are not here."""
        lacking = [name for name, _ in model.named_parameters() if name not in self._tensors]
        return lacking + [name for name, _ in model.named_buffers() if name not in self._buffers]

    def rows(self, name: str, weight: Tensor, first: int, count: int) -> Tensor:
        """Returns rows of a weight or of a buffer, as a model in model.dtype has them."""
        if name in self._buffers:
            buffer: Tensor = self._buffers[name]
            return buffer
        found = (
            self._tensors.rows(name, first, count) if weight.dim() else self._tensors.whole(name)
        )
        return found.to(self._dtype)
