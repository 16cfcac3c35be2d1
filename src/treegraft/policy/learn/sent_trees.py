"""Trees on their way from rank 0 to the others: JSON, and their numbers as one tensor.

A token has up to seven numbers, and as text they took longer to write and read than all that Python
does besides. In the tensor each takes eight bytes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treegraft.core.columns import FILLERS
from treegraft.core.types import Tree
from treegraft.runs.tree_json import tree_from_dict, tree_to_dict

_COLUMNS = {"token_ids": "q", "lesson_ids": "q", **dict.fromkeys(FILLERS, "d")}
"""The numbers of a tree with their types, as `array` names them."""


def packed(trees: Sequence[Tree]) -> tuple[list[str], Tensor]:
    """Returns each tree as JSON, with the number of bytes of each column in its place, and the
    columns as [bytes] uint8."""
    columns = bytearray()
    texts = []
    for tree in trees:
        data = tree_to_dict(tree)
        for step in data["steps"]:
            for name, kind in _COLUMNS.items():
                if step.get(name) is not None:
                    found = array(kind, step[name]).tobytes()
                    columns += found
                    step[name] = len(found)
        texts.append(json.dumps(data, default=str))
    return texts, torch.from_numpy(np.frombuffer(columns, np.uint8))


def unpacked(texts: Sequence[str], columns: Tensor) -> list[Tree]:
    """Returns the trees that `packed` was given."""
    found = columns.numpy().tobytes()
    end = 0
    trees = []
    for text in texts:
        data = json.loads(text)
        for step in data["steps"]:
            for name, kind in _COLUMNS.items():
                if step.get(name) is not None:
                    begin = end
                    end = end + step[name]
                    step[name] = array(kind, found[begin:end]).tolist()
        trees.append(tree_from_dict(data))
    return trees
