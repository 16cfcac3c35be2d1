"""The model inside one module whose forward pass returns scores.

All that touches weights runs in it, so that weights which are sharded by layer are gathered for
it and their gradients summed after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treegraft.policy.learn.pack import TreeBatch
from treegraft.policy.learn.scores import (
    Scores,
    chunked_argmax,
    chunked_scores,
    packed_hidden,
    rowwise_hidden,
)
from treegraft.policy.output_head import OutputHead
from treegraft.settings.policy import LearnSettings


class Scored(nn.Module):
    """A model as a function from batches to scores."""

    def __init__(self, model: Any, settings: LearnSettings, *, is_packed: bool = True) -> None:
        """Takes over `model`.

        Args:
            is_packed: False runs trees row by row.
        """
        super().__init__()
        self.model = model
        self._settings, self._is_packed = settings, is_packed
        self._head = OutputHead(model)

    def forward(
        self, batch: TreeBatch, *, takes_imitated: bool = False, wants_argmax: bool = False
    ) -> Scores | Tensor:
        """Returns (logprobs, entropies) of the unique sampled tokens and, with `takes_imitated`,
        of the imitated tokens after them; with `wants_argmax` the most likely tokens instead."""
        targets, temperatures = self._wanted(batch, takes_imitated)
        hidden = self._hidden(batch)[: targets.numel()]
        chunk = self._settings.vocab_chunk
        if wants_argmax:
            return chunked_argmax(self._head, hidden, chunk)
        return chunked_scores(self._head, hidden, targets, temperatures, chunk)

    def _wanted(self, batch: TreeBatch, takes_imitated: bool) -> tuple[Tensor, Tensor]:
        """The tokens to score, and their temperatures."""
        places, temperatures = batch.sampled, batch.temperatures
        if takes_imitated and batch.imitated is not None:
            places = torch.cat([places, batch.imitated.packed])
            temperatures = torch.cat([temperatures, batch.imitated.temperatures])
        return batch.token_ids[places], temperatures

    def _hidden(self, batch: TreeBatch) -> Tensor:
        if not self._is_packed:
            return rowwise_hidden(self.model, batch)
        return packed_hidden(self.model, batch, compile_kernels=self._settings.compile_kernels)
