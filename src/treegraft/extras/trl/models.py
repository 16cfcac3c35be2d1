"""The model, its type, its adapters and its tokenizer, of a recipe and of TRL's trainer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from treegraft import Config, SettingError, load_config


def with_model(config: Config, model: Any) -> Config:
    """Returns the recipe with the path and the type of a model of the user's.

    Raises:
        SettingError: a model that is quantised, or has no files.
    """
    if model is None:
        return config
    if isinstance(model, str):
        return _changed(config, path=model)
    # The engine samples by plain weights, which would be another policy.
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise SettingError(
            "model: got a quantised one, expected float32 or bfloat16 weights.",
            code="trl-quantised",
        )
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    if not path:
        raise SettingError(
            "model: got one without files, expected one that was loaded from a hub id or a folder,"
            " where the engine and the tokenizer come from; save it and load it from there.",
            code="trl-model-without-files",
        )
    return _changed(config, path=path, dtype=str(model.dtype).removeprefix("torch."))


def _changed(config: Config, **model: str) -> Config:
    return load_config(config, [f"model.{key}={json.dumps(value)}" for key, value in model.items()])


def loaded_dtype(given: Mapping[str, Any], config: Config, *, adapts: bool) -> str:
    """Returns the type that TRL loads the model in. Weights that are trained are float32, as in our
    learner: in bfloat16 a step of 1e-6 would vanish. TRL computes in bfloat16 by its `bf16`.

    Args:
        given: the model_init_kwargs of TRL's arguments, whose dtype is taken literally.
        adapts: whether adapters alone are trained.

    Raises:
        SettingError: another dtype than the recipe's.
    """
    if "dtype" not in given:
        return config.model.dtype if adapts else "float32"
    got = str(given["dtype"]).removeprefix("torch.")
    if got != config.model.dtype:
        raise SettingError(
            f"model_init_kwargs: got dtype {got}, expected {config.model.dtype} by model.dtype of"
            " the recipe, which says it; change it there.",
            code="trl-differs-from-recipe",
        )
    return got


def same_tokenizer(given: Any, own: Any) -> Any:
    """Returns a tokenizer for TRL, which changes it.

    Raises:
        SettingError: the user's differs from the recipe's.
    """
    if given is None:
        # TRL sets padding on it, which our formats must not see.
        return copy.deepcopy(own)
    same = (
        hasattr(given, "get_vocab")
        and given.get_vocab() == own.get_vocab()
        and given.eos_token_id == own.eos_token_id
    )
    if not same:
        raise SettingError(
            "processing_class: got a tokenizer that differs from the model's, which the trees are"
            " written with; expected that one, or none.",
            code="trl-other-tokenizer",
        )
    return given


def lora_config(config: Config, given: Any) -> Any:
    """Returns TRL's peft_config: the user's, or that of model.lora; None without adapters.

    Raises:
        SettingError: both say it.
    """
    lora = config.model.lora
    if not lora.rank:
        return given
    if given is not None:
        raise SettingError(
            "peft_config: expected none: model.lora of the recipe says it; set model.lora.rank = 0"
            " or leave it out.",
            code="trl-recipe-says",
        )
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets
    )
