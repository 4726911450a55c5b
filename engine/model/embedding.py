"""A sequence's embedding: what the model makes of its last token, of length 1.

The last layer's output behind the last token, with the model's own last norm, divided by its
length: the pooling ``last`` of other servers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.model.model import DecoderModel

Embedding = tuple[float, ...]
"""[hidden_size], each of them an fp32 number."""


class Embedder:
    """Holds a model's last norm. Owned by the engine thread."""

    def __init__(self, model: DecoderModel) -> None:
        self.layer = model.config.layers
        """Of which ``StepInput.hidden_layers`` has the states: what the last layer puts out."""
        self._norm = model.norm
        self._epsilon = model.config.rms_norm_eps

    def embed(self, states: torch.Tensor) -> list[Embedding]:
        """Of each of ``states``, fp32 [rows, hidden_size], its embedding."""
        normed = F.rms_norm(states.float(), self._norm.shape, self._norm, self._epsilon)
        found: list[list[float]] = F.normalize(normed, dim=-1).tolist()
        return [tuple(row) for row in found]

    def embed_rows(
        self, hidden: torch.Tensor, layers: tuple[int, ...], tokens: Mapping[int, int], rows: int
    ) -> tuple[Embedding | None, ...]:
        """One for each row of a step, None for a row that wants none.

        ``hidden`` is the step's, of ``layers``; ``tokens`` are those to embed, by row.
        """
        states = hidden[list(tokens.values()), layers.index(self.layer)]
        found = dict(zip(tokens, self.embed(states), strict=True))
        return tuple(found.get(row) for row in range(rows))
