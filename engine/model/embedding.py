"""Sequence embeddings: the model's output after a sequence's last token, normalized to length 1.

An embedding is the last layer's output after the last token, normalized by the model's last norm,
and divided by its length. Other servers call this pooling ``last``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.model.model import DecoderModel

Embedding = tuple[float, ...]
"""The hidden_size numbers of one embedding, fp32."""


class Embedder:
    """Computes sequence embeddings with a model's last norm. Owned by the engine thread."""

    def __init__(self, model: DecoderModel) -> None:
        self.layer = model.config.layers
        """The layer number to request in ``StepInput.hidden_layers`` in order to get the last
        layer's output."""
        self._norm = model.norm
        self._epsilon = model.config.rms_norm_eps

    def embed(self, states: torch.Tensor) -> list[Embedding]:
        """Compute the embeddings of ``states``, fp32 [rows, hidden_size]."""
        normed = F.rms_norm(states.float(), self._norm.shape, self._norm, self._epsilon)
        found: list[list[float]] = F.normalize(normed, dim=-1).tolist()
        return [tuple(row) for row in found]

    def embed_rows(
        self, hidden: torch.Tensor, layers: tuple[int, ...], tokens: Mapping[int, int], rows: int
    ) -> tuple[Embedding | None, ...]:
        """Compute the embedding of each row of a step; None for a row that wants none.

        ``hidden`` is ``StepOutput.hidden``, and ``layers`` its layers. ``tokens`` maps rows to the
        indexes of the tokens to embed.
        """
        states = hidden[list(tokens.values()), layers.index(self.layer)]
        found = dict(zip(tokens, self.embed(states), strict=True))
        return tuple(found.get(row) for row in range(rows))
