"""A checkpoint's tensors by name, checked against the shapes that the config makes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.errors import ConfigError
from engine.linear import Linear


class NamedTensors:
    """Gives out tensors as they are and as linear layers; its methods raise ConfigError."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str, *shape: int) -> torch.Tensor:
        weight = self._weights.get(name)
        if weight is None:
            raise ConfigError(f"the model's weights have no tensor {name}")
        if tuple(weight.shape) != shape:
            raise ConfigError(
                f"the model's tensor {name} is {tuple(weight.shape)};"
                f" its config.json makes it {shape}"
            )
        return weight

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A layer with the bias that the checkpoint has for it, if any."""
        return Linear(self.take(f"{name}.weight", outputs, inputs), self._bias(name, outputs))

    def split_linear(self, name: str, outputs: tuple[int, ...], inputs: int) -> tuple[Linear, ...]:
        """Several layers whose weights lie under one another in one tensor; views of it."""
        weight = self.take(f"{name}.weight", sum(outputs), inputs)
        bias = self._bias(name, sum(outputs))
        biases = [None] * len(outputs) if bias is None else torch.split(bias, list(outputs))
        return tuple(
            Linear(part, part_bias)
            for part, part_bias in zip(torch.split(weight, list(outputs)), biases, strict=True)
        )

    def _bias(self, name: str, outputs: int) -> torch.Tensor | None:
        return self.take(f"{name}.bias", outputs) if f"{name}.bias" in self._weights else None
