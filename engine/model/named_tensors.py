"""A checkpoint's weights by name, checked against the shapes that its config implies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from baton.errors import ConfigError
from engine.model.layers import Linear
from engine.quantization.weight import QuantizedWeight

Matrix = torch.Tensor | QuantizedWeight
TIED_HEAD = "tied_lm_head.weight"
"""Name of the quantized copy of the embedding that serves as the head, in models that tie the
two."""
Kind = TypeVar("Kind", bound=Matrix)


class NamedTensors:
    """Returns a checkpoint's weights by name, as tensors or as linear layers. Its methods raise
    ConfigError."""

    def __init__(self, weights: Mapping[str, Matrix]) -> None:
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor ``name``, which must have this shape and not be quantized."""
        weight = self._weights.get(name)
        if isinstance(weight, QuantizedWeight):
            raise ConfigError(f"the model's tensor {name} is quantized; it must be plain")
        return _checked(name, weight, shape)

    def matrix(self, name: str, *shape: int) -> Matrix:
        """Return the tensor ``name``, which must have this shape and may be quantized."""
        return _checked(name, self._weights.get(name), shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """Make a linear layer from the weight ``name``, with the checkpoint's bias if there is
        one."""
        return Linear(self.matrix(f"{name}.weight", outputs, inputs), self._bias(name, outputs))

    def split_linear(self, name: str, outputs: tuple[int, ...], inputs: int) -> tuple[Linear, ...]:
        """Make several linear layers whose weights are stacked in one tensor. The weights are views
        of it."""
        weight = self.matrix(f"{name}.weight", sum(outputs), inputs)
        bias = self._bias(name, sum(outputs))
        layers, end = [], 0
        for count in outputs:
            rows = slice(end, end + count)
            part = weight.rows(rows) if isinstance(weight, QuantizedWeight) else weight[rows]
            layers.append(Linear(part, None if bias is None else bias[rows]))
            end += count
        return tuple(layers)

    def _bias(self, name: str, outputs: int) -> torch.Tensor | None:
        return self.take(f"{name}.bias", outputs) if f"{name}.bias" in self._weights else None


def _checked(name: str, weight: Kind | None, shape: tuple[int, ...]) -> Kind:
    if weight is None:
        raise ConfigError(f"the model's weights have no tensor {name}")
    if tuple(weight.shape) != shape:
        raise ConfigError(
            f"the model's tensor {name} is {tuple(weight.shape)}; its config.json requires {shape}"
        )
    return weight
