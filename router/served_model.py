"""The model as clients know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that a cluster serves."""

    id: str
    created: int
    """Unix seconds."""
    context_length: int
    """Most tokens of prompt and answer together."""
    embedding_size: int
    """Numbers of an embedding."""
