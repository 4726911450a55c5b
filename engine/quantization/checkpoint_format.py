"""Reads ``quantization_config`` of a checkpoint: which tensors make up a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.quantization.formats import (
    NATIVE_CONFIG,
    NATIVE_METHOD,
    read_awq,
    read_float8,
    read_gptq,
    read_int8,
    read_native,
    read_packed,
)
from engine.quantization.weight import QuantizedWeight

SERVED = (
    "gptq of 4 and 8 bits, awq (gemm) of 4 bits, fp8 and fbgemm_fp8 (e4m3), compressed-tensors "
    "(float-quantized of 8 bits, int-quantized of 8, pack-quantized of 4 and 8), and baton's own"
)

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How to find and read the quantized weights of one checkpoint format."""

    method: str
    marks: tuple[str, ...]
    """Endings of tensor names that show that their module is quantized."""
    parts: tuple[str, ...]
    """Name endings of all tensors that make up a quantized module; ``read`` gets them by these
    endings."""
    read: Callable[[Parts], QuantizedWeight]
    """Makes a weight from the module's tensors; raises KeyError or ValueError if they do not
    fit."""
    prefix: str = ""
    """Text between the module's name and each ending in the tensors' names."""

    def module(self, name: str) -> str | None:
        """Return the module that a tensor's name shows to be quantized; None if the name shows
        none."""
        for mark in self.marks:
            ending = f".{self.prefix}{mark}"
            if name.endswith(ending):
                return name.removesuffix(ending)
        return None

    def names(self, module: str) -> dict[str, str]:
        """Return the names of a module's tensors in the file, by their endings."""
        return {part: f"{module}.{self.prefix}{part}" for part in self.parts}


UNUSED = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "q_scale")
"""Name endings of the tensors for quantized activations and KV in a checkpoint. Baton does not use
them."""


def checkpoint_format(folder: Path) -> CheckpointFormat | None:
    """Return the format that config.json in ``folder`` names; None if the weights are not
    quantized.

    Raises ConfigError if the format is not supported.
    """
    path = folder / "config.json"
    config = _quantization_config(path)
    if not config:
        return None
    method = config.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(f"{path}: weights quantized with {method} are not supported; {_served()}")
    return reader(_Config(path, config))


def _served() -> str:
    return f"supported: {SERVED}"


def _quantization_config(path: Path) -> dict[str, Any]:
    whole = ConfigFields.read_if_any(path)
    name = "quantization_config" if whole.get("quantization_config") else "compression_config"
    return dict(whole.object(name).values)


@dataclass(frozen=True, slots=True)
class _Config:
    """The ``quantization_config`` of a config.json, or an object within it."""

    path: Path
    values: dict[str, Any]

    def one_of(self, name: str, served: tuple[Any, ...], default: Any = None) -> Any:
        """Return the field ``name``, or ``default`` if it is absent. Raises ConfigError unless it
        is one of ``served``."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, list | dict) or value not in served:
            known = ", ".join(str(one) for one in served)
            raise ConfigError(
                f"{self.path}: quantized weights with {name} {value} are not supported; "
                f"supported: {name} {known}"
            )
        return value

    def object(self, name: str) -> _Config:
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {name} must be an object, and is {value!r}")
        return _Config(self.path, value)

    def refuse(self, *names: str) -> None:
        """Raise ConfigError if any of these fields is set, because it is not supported."""
        for name in names:
            if self.values.get(name):
                raise ConfigError(
                    f"{self.path}: quantized weights with {name} are not supported; {_served()}"
                )

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the field as the size [rows, columns] of a block; None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(isinstance(size, int) and size > 0 for size in value)
        ):
            raise ConfigError(f"{self.path}: {name} must be two sizes, and is {value!r}")
        return value[0], value[1]


def _gptq(config: _Config) -> CheckpointFormat:
    bits = config.one_of("bits", (4, 8))
    config.refuse("is_marlin_format")
    # Newer versions of GPTQModel use the second name.
    field = "checkpoint_format" if config.values.get("checkpoint_format") else "format"
    v2 = config.one_of(field, ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    _refuse_mixed_bits(config, bits)
    return CheckpointFormat(
        "gptq",
        ("qweight",),
        ("qweight", "qzeros", "scales", "g_idx"),
        lambda parts: read_gptq(parts, bits, v2=v2),
    )


def _refuse_mixed_bits(config: _Config, bits: int) -> None:
    """Raise ConfigError if modules have different numbers of bits. GPTQModel's ``dynamic`` sets
    options per module; different group sizes are fine, because the tensors show them."""
    for pattern, settings in config.object("dynamic").values.items():
        if isinstance(settings, dict) and settings.get("bits", bits) != bits:
            raise ConfigError(
                f"{config.path}: bits {settings['bits']} for {pattern} and bits {bits} for others"
                " are not supported; all modules must have the same bits"
            )


def _awq(config: _Config) -> CheckpointFormat:
    config.one_of("bits" if "bits" in config.values else "w_bit", (4,))
    config.one_of("version", ("gemm", "GEMM"), "gemm")
    return CheckpointFormat("awq", ("qweight",), ("qweight", "qzeros", "scales"), read_awq)


def _fp8(config: _Config) -> CheckpointFormat:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = config.block("weight_block_size")

    def read(parts: Parts) -> QuantizedWeight:
        scales = parts.get("weight_scale_inv")
        return read_float8(
            parts["weight"], parts["weight_scale"] if scales is None else scales, block
        )

    marks = ("weight_scale_inv", "weight_scale")
    return CheckpointFormat("fp8", marks, ("weight", *marks), read)


def _compressed(config: _Config) -> CheckpointFormat:
    config.refuse("transform_config")
    if config.object("sparsity_config").values.get("format", "dense") != "dense":
        config.refuse("sparsity_config")
    schemes = [_Config(config.path, group) for group in _groups(config)]
    layout = config.one_of("format", ("float-quantized", "int-quantized", "pack-quantized"))
    weights = [scheme.object("weights") for scheme in schemes]
    kind = "float" if layout == "float-quantized" else "int"
    served = (4, 8) if layout == "pack-quantized" else (8,)
    settings = {
        (
            scheme.one_of("type", (kind,), "int"),
            scheme.one_of("num_bits", served, 8),
            scheme.block("block_structure"),
        )
        for scheme in weights
    }
    if len(settings) != 1:
        raise ConfigError(
            f"{config.path}: {len(settings)} kinds of config_groups are not supported;"
            " all must be alike"
        )
    ((_type, bits, block),) = settings
    return _compressed_format(layout, bits, block)


def _groups(config: _Config) -> list[dict[str, Any]]:
    groups = list(config.object("config_groups").values.values())
    if not groups or not all(isinstance(group, dict) for group in groups):
        raise ConfigError(f"{config.path}: config_groups must hold an object per group of layers")
    return groups


def _compressed_format(layout: str, bits: int, block: tuple[int, int] | None) -> CheckpointFormat:
    def read(parts: Parts) -> QuantizedWeight:
        if layout == "pack-quantized":
            return read_packed(parts, bits)
        if layout == "int-quantized":
            return read_int8(parts)
        if "weight_zero_point" in parts:
            raise ValueError("it has a zero point, which float weights must not have")
        return read_float8(parts["weight"], parts["weight_scale"], block)

    packed = ("weight_packed", "weight_shape", "weight_g_idx")
    return CheckpointFormat(
        f"compressed-tensors {layout}",
        ("weight_scale",),
        ("weight", *packed, "weight_scale", "weight_zero_point"),
        read,
    )


def _native(config: _Config) -> CheckpointFormat:
    config.one_of("version", (NATIVE_CONFIG["version"],))
    parts = ("codes", "scales", "mins", "columns")
    return CheckpointFormat(NATIVE_METHOD, ("codes",), parts, read_native, prefix="weight.")


_METHODS: dict[str, Callable[[_Config], CheckpointFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    NATIVE_METHOD: _native,
}
