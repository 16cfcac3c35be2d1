"""The arguments of a call on their way from rank 0 to the others: JSON, and the numbers of trees as
one tensor.

A token has up to seven numbers, and as text they took longer to write and read than all that Python
does besides.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treegraft.core.types import Tree
from treegraft.runs.tree_json import SAMPLED_COLUMNS, tree_from_dict, tree_to_dict

_IDS = ("token_ids", "lesson_ids")


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
    """Returns each tree as JSON, with the length of each column in its place, and the columns as
    [values] int64: the number of ids, the ids, then the bits of the float64 numbers."""
    ids, numbers, texts = array("q", [0]), array("d"), []
    for tree in trees:
        data = tree_to_dict(tree)
        for step in data["steps"]:
            for names, column in ((_IDS, ids), (SAMPLED_COLUMNS, numbers)):
                for name in names:
                    values = step.get(name)
                    if values is not None:
                        column.extend(values)
                        step[name] = len(values)
        texts.append(json.dumps(data, default=str))
    ids[0] = len(ids) - 1
    return texts, torch.frombuffer(bytearray(ids.tobytes() + numbers.tobytes()), dtype=torch.int64)


def unpacked(texts: Sequence[str], columns: Tensor) -> list[Tree]:
    """Returns the trees that `packed` was given."""
    end = 1 + int(columns[0])
    ids, numbers = iter(columns[1:end].tolist()), iter(columns[end:].view(torch.float64).tolist())
    trees = []
    for text in texts:
        data = json.loads(text)
        for step in data["steps"]:
            for names, column in ((_IDS, ids), (SAMPLED_COLUMNS, numbers)):
                for name in names:
                    count = step.get(name)
                    if count is not None:
                        step[name] = list(islice(column, count))
        trees.append(tree_from_dict(data))
    return trees
