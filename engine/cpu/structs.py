"""Input of the CPU's C++ code: its structs, and weights packed in the order in which the code reads
them.

A packed weight consists of panels of 32 outputs, with pairs of inputs. The structs are those of
decoder.cpp and linear.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.quantization.weight import QuantizedWeight, unpack_nibbles

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_Fields = list[tuple[str, type]]


class Matrix(ctypes.Structure):
    """A packed weight as linear.h reads it: addresses of the tensors that ``packed_parts``
    makes."""

    _fields_: ClassVar[_Fields] = [
        *((name, _SIZE) for name in ("kind", "outputs", "inputs", "group", "half_scales")),
        *((name, _POINTER) for name in ("data", "scales", "mins", "bias", "columns")),
    ]


class Layer(ctypes.Structure):
    """The weights of one layer, as decoder.cpp reads them. A null pointer means that the layer
    lacks the weight."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, _POINTER)
            for name in (
                "attention_norm",
                "query_norm",
                "key_norm",
                "attention_post_norm",
                "mlp_norm",
                "mlp_post_norm",
                "feature_norm",
            )
        ),
        ("residual_normed", _SIZE),
        ("rope", _POINTER),
        ("rotary", _SIZE),
        ("window", _SIZE),
        *((name, Matrix) for name in ("query", "key", "value", "output")),
        ("experts", _SIZE),
        ("router", Matrix),
        *((name, ctypes.POINTER(Matrix)) for name in ("gate", "up", "down")),
    ]


class Model(ctypes.Structure):
    """The decoder's sizes, options and layers, as decoder.cpp reads them."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, _SIZE)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "dim",
                "vocab",
                "qk_norm",
                "activation",
                "experts_per_token",
                "experts_normalized",
            )
        ),
        *(
            (name, _FLOAT)
            for name in (
                "eps",
                "attention_scale",
                "attention_softcap",
                "logits_softcap",
                "embedding_scale",
            )
        ),
        ("embedding", _POINTER),
        ("norm", _POINTER),
        ("head", Matrix),
        ("combine", Matrix),
        ("layer", ctypes.POINTER(Layer)),
    ]


class Cache(ctypes.Structure):
    """Address and layout of the KV blocks, as engine/cpu/kv_codes.h reads them."""

    _fields_: ClassVar[_Fields] = [
        ("kind", _SIZE),
        *((name, _POINTER) for name in ("data", "scales")),
        *(
            (name, _SIZE)
            for name in (
                "block_stride",
                "layer_stride",
                "scale_block_stride",
                "scale_layer_stride",
                "block_size",
            )
        ),
    ]


class Step(ctypes.Structure):
    """The input of one step, as decoder.cpp reads it."""

    _fields_: ClassVar[_Fields] = [
        *((name, _SIZE) for name in ("tokens", "rows", "outputs", "threads")),
        *(
            (name, _POINTER)
            for name in (
                "token_ids",
                "positions",
                "blocks",
                "slots",
                "first",
                "count",
                "start",
                "table",
                "tables",
                "output",
                "embedded",
                "logits",
                "best",
                "layers_done",
                "features",
                "combined",
                "hidden",
                "hidden_layer",
            )
        ),
        ("hidden_layers", _SIZE),
    ]


def address(values: torch.Tensor | npt.NDArray[np.generic] | None) -> int | None:
    """Return the memory address of ``values``; None if ``values`` is None. ``values`` must be
    contiguous, and the caller must keep them alive."""
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        assert values.is_contiguous()
        return values.data_ptr()
    assert values.flags.c_contiguous
    return values.ctypes.data


PANEL = 32
"""Number of outputs in a panel of a packed weight; PANEL in linear.h."""
LAYOUT_VERSION = 3
"""Version of the layout of packed weights. Raise it whenever packing or quantizing the same weight
gives other bytes."""


def pack_panels(values: torch.Tensor) -> torch.Tensor:
    """Pack a matrix [out, in], ``in`` even, into panels [panels, in / 2, 32, 2], with zeros after
    the last output."""
    outputs, inputs = values.shape
    padded = F.pad(values, (0, 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, inputs // 2, 2)
    return panels.transpose(1, 2).contiguous()


def pack_codes(weight: QuantizedWeight) -> torch.Tensor:
    """Pack a quantized weight's codes into panels: uint8 [panels, in / 2, 64], or [panels, in / 2,
    32] for ``int4``.

    quantized.h describes the layout.
    """
    if weight.kind != "int4":
        return pack_panels(weight.codes).flatten(2)
    codes = pack_panels(unpack_nibbles(weight.codes)).flatten(2)
    return codes[..., :32] | (codes[..., 32:] << 4)


def pack_factors(factors: torch.Tensor) -> torch.Tensor:
    """Pack a quantized weight's scales or minimums [out, groups] into panels [panels, groups,
    32]."""
    outputs, groups = factors.shape
    padded = F.pad(factors, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()


def packed_parts(
    name: str, weight: torch.Tensor | QuantizedWeight
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a packed weight with their names, as ``PackedCache.get_or_build`` takes
    them."""
    if isinstance(weight, torch.Tensor):
        yield f"{name}.data", pack_panels(weight.to(torch.bfloat16))
        return
    yield f"{name}.data", pack_codes(weight)
    yield f"{name}.scales", pack_factors(weight.scales)
    if weight.mins is not None:
        yield f"{name}.mins", pack_factors(weight.mins)
    if weight.columns is not None:
        yield f"{name}.columns", weight.columns
