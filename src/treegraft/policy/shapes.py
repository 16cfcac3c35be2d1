"""The table of published model shapes (`shapes.toml`), for models of random weights."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from treegraft.core.errors import ModelError, nearest

PREFIX = "shape:"
"""What model.path begins with where it names a shape."""


@functools.cache
def shape_table() -> Mapping[str, Mapping[str, Any]]:
    """Returns the fields of a config.json by name of the shape."""
    file = resources.files("treegraft.policy") / "shapes.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def published_shape(path: str) -> dict[str, Any]:
    """Returns the fields for "shape:NAME".

    Raises:
        ModelError: there is no such shape.
    """
    name, table = path.removeprefix(PREFIX), shape_table()
    if name not in table:
        known = [PREFIX + one for one in table]
        raise ModelError(
            f"model.path: got '{path}', expected one of {', '.join(known)}.{nearest(path, known)}"
        )
    return dict(table[name])


def shape_named(hub_id: str) -> dict[str, Any] | None:
    """Returns the fields for a model on a hub whose name begins with that of a published shape,
    such as "Qwen/Qwen2.5-7B-Instruct"; None where none does."""
    name = hub_id.rpartition("/")[2].lower()
    fits = [one for one in shape_table() if f"{name}-".startswith(f"{one}-")]
    return dict(shape_table()[max(fits, key=len)]) if fits else None


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
