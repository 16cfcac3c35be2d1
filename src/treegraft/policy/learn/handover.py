"""Trees on their way from rank 0 to the others: facts as JSON, columns of numbers as one tensor.

A token has up to seven numbers, and as text they took longer to write and read than all that Python
does besides.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from treegraft.core.types import Tree
from treegraft.runs.tree_json import SAMPLED_COLUMNS, tree_from_dict, tree_to_dict

_IDS = ("token_ids", "lesson_ids")


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
