"""The shape of a recipe's model, read without loading it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegraft.parts import errors, packages, shapes

if TYPE_CHECKING:
    from treegraft import Config

_TINY_WORDS = 16
"""Markup, tags of tools and special tokens of a tiny model's vocabulary, beside the tasks'
words."""


def _tiny_shape(config: Config, num_words: int) -> shapes.ModelShape:
    tiny = config.model.tiny
    vocab = num_words + _TINY_WORDS
    head_dim = tiny.hidden_size // tiny.num_heads
    # In columns of width hidden_size: query and output, key and value, the three matrices of the
    # feed-forward part, two norms; embeddings and head are not tied.
    width = 2 * tiny.hidden_size + 2 * tiny.num_kv_heads * head_dim
    layer = width + 3 * tiny.intermediate_size + 2
    return shapes.ModelShape(
        num_weights=(tiny.num_layers * layer + 2 * vocab + 1) * tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=head_dim,
        hidden_size=tiny.hidden_size,
        vocab_size=vocab,
    )


def _folder_shape(folder: Path) -> shapes.ModelShape:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Models that also see keep the language model's settings one level down.
    settings = settings.get("text_config", settings)
    num_weights = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            # The header alone: eight bytes of length, then JSON with every shape.
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        num_weights += sum(math.prod(tensor["shape"]) for tensor in header.values())
    if not num_weights:
        raise errors.ModelError(
            f"model folder '{folder}' has a config.json but no .safetensors file with weights.",
            code="weights-missing",
        )
    return shapes.ModelShape.of_config(settings, num_weights)


@functools.cache  # reading it takes seconds
def _gguf_shape(path: Path) -> shapes.ModelShape:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    # Names begin with the architecture, such as "llama.block_count".
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    names = ("attention.head_count", "attention.head_count_kv", "embedding_length", "block_count")
    if missing := [name for name in names if name not in fields]:
        raise errors.ModelError(
            f"model file '{path}' does not say its '{missing[0]}'; is it a language model?",
            code="gguf-invalid",
        )
    heads, num_kv_heads, width, num_layers = (int(fields[name].contents()) for name in names)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    return shapes.ModelShape(
        num_weights=sum(sizes.values()),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=width // heads,
        hidden_size=width,
        vocab_size=sizes["token_embd.weight"] // width,
    )


def shape_named(hub_id: str) -> dict[str, Any] | None:
    """Returns the fields for a model on a hub whose name begins with that of a published shape,
    such as "Qwen/Qwen2.5-7B-Instruct"; None where none does."""
    name = hub_id.rpartition("/")[2].lower()
    fits = [one for one in shapes.shape_table() if f"{name}-".startswith(f"{one}-")]
    return dict(shapes.shape_table()[max(fits, key=len)]) if fits else None


def num_shape_weights(fields: Mapping[str, Any]) -> int:
    """Returns the weights of a shape of the table; a tied head counts once."""
    width, own = fields["hidden_size"], fields["head_dim"]
    query, key = fields["num_attention_heads"] * own, fields["num_key_value_heads"] * own
    # Query and output, key and value, the three matrices of the feed-forward part, two norms.
    layer = width * (2 * query + 2 * key + 3 * fields["intermediate_size"] + 2)
    if fields["model_type"] == "qwen2":
        layer += query + 2 * key  # biases
    if fields["model_type"] == "qwen3":
        layer += 2 * own  # norms of queries and keys
    ends = width * fields["vocab_size"] * (1 if fields["tie_word_embeddings"] else 2)
    return int(fields["num_hidden_layers"] * layer + ends + width)


def model_shape(config: Config, num_words: int) -> shapes.ModelShape | None:
    """Returns the shape of the recipe's model without loading it; None for a hub model that is
    neither here nor of a published shape by its name.

    Args:
        num_words: those of the tasks, which a tiny model has embeddings of.

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    path = config.model.path
    if path == "tiny":
        return _tiny_shape(config, num_words)
    if path.startswith(shapes.PREFIX):
        fields = shapes.published_shape(path)
        return shapes.ModelShape.of_config(fields, num_shape_weights(fields))
    place, gguf = shapes.locate(path)
    if gguf is not None:
        packages.require(f"model file '{Path(place) / gguf}'", "gguf")
        return _gguf_shape(Path(place) / gguf)
    if Path(place).is_dir():
        return _folder_shape(Path(place))
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise errors.ModelError(
            f"model.path '{path}': no such folder, and no name of a model on a hub.",
            code="model-missing",
        )
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    folder = Path(found).parent if isinstance(found, str) else None
    if folder and any(folder.glob("*.safetensors")):
        return _folder_shape(folder)
    if (named := shape_named(path)) is None:
        return None
    return shapes.ModelShape.of_config(named, num_shape_weights(named))
