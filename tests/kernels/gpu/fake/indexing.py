"""``x[key]`` by torch's operators, one for each part of the key."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch

Part = int | slice | torch.Tensor | EllipsisType | list[int] | None
Key = Part | tuple[Part, ...]


def get_item(x: torch.Tensor, key: Key) -> torch.Tensor:
    """``x[key]``"""
    view, indices = _view(x, key)
    return torch.ops.aten.index.Tensor(view, indices) if indices else view


def set_item(x: torch.Tensor, key: Key, value: Any) -> None:
    """``x[key] = value``"""
    view, indices = _view(x, key)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if indices:
        torch.ops.aten.index_put_.default(view, indices, value)
    else:
        torch.ops.aten.copy_.default(view, value)


def _view(x: torch.Tensor, key: Key) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What the numbers and slices of the key leave, and the tensors to index that with."""
    parts = list(key) if isinstance(key, tuple) else [key]
    taken = sum(part is not None and part is not ... for part in parts)
    if any(part is ... for part in parts):
        at = next(n for n, part in enumerate(parts) if part is ...)
        parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    indices: list[torch.Tensor | None] = []
    dim = 0
    for part in parts:
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        index: torch.Tensor | None = None
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            if part != slice(None):
                x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
        else:
            index = part if isinstance(part, torch.Tensor) else torch.tensor(part)
        indices.append(index)
        dim += 1
    return x, indices if any(index is not None for index in indices) else []
