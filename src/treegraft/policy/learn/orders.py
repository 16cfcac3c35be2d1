"""The arguments of a call on their way from rank 0 to the others: JSON, and the numbers of trees as
one tensor.

A token has up to seven numbers, and as text they took longer to write and read than all that Python
does besides. In the tensor they are packed as in memory, a sampled token in some 20 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft.core.columns import FILLERS, numbers, pack_ids, pack_scores
from treegraft.core.types import Tree
from treegraft.runs.tree_json import tree_from_dict, tree_to_dict

_COLUMNS = ((("token_ids", "lesson_ids"), pack_ids), (FILLERS, pack_scores))


def order_of(
    args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor | None]:
    """Returns a call's arguments as JSON, and the columns of the trees among them, see `packed`;
    None without trees.

    Args:
        args, options: its positional and its named arguments: trees, paths, and what JSON holds
            except objects.
    """
    trees: list[Tree] = []

    def written(value: Any) -> Any:
        if isinstance(value, Path):
            # The others may run in another folder.
            return {"path": str(value.resolve())}
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tree):
            trees.extend(value)
            return {"num_trees": len(value)}
        return value

    order: dict[str, Any] = {
        "args": [written(value) for value in args],
        "options": {name: written(value) for name, value in options.items()},
    }
    if not trees:
        return order, None
    order["trees"], columns = packed(trees)
    return order, columns


def arguments_of(order: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments that `order_of` was given, from an order that holds the columns too."""
    trees = iter(unpacked(order["trees"], order["columns"]) if "trees" in order else ())

    def read(value: Any) -> Any:
        match value:
            case {"path": path}:
                return Path(path)
            case {"num_trees": count}:
                return list(islice(trees, count))
        return value

    args = [read(value) for value in order.get("args", ())]
    return args, {name: read(value) for name, value in order.get("options", {}).items()}


def packed(trees: Sequence[Tree]) -> tuple[list[str], Tensor]:
    """Returns each tree as JSON, with the number of bytes of each column in its place, and the
    columns as [bytes] uint8."""
    columns, texts = bytearray(), []
    for tree in trees:
        data = tree_to_dict(tree)
        for step in data["steps"]:
            for names, pack in _COLUMNS:
                for name in names:
                    if step.get(name) is not None:
                        found = pack(step[name])
                        columns += found
                        step[name] = len(found)
        texts.append(json.dumps(data, default=str))
    return texts, torch.from_numpy(np.frombuffer(columns, np.uint8))


def unpacked(texts: Sequence[str], columns: Tensor) -> list[Tree]:
    """Returns the trees that `packed` was given."""
    found, end, trees = columns.numpy().tobytes(), 0, []
    for text in texts:
        data = json.loads(text)
        for step in data["steps"]:
            for names, _ in _COLUMNS:
                for name in names:
                    if step.get(name) is not None:
                        begin, end = end, end + step[name]
                        step[name] = numbers(found[begin:end]).tolist()
        trees.append(tree_from_dict(data))
    return trees
