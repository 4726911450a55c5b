"""The C structs of decoder.cpp and linear.h, field by field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_Fields = list[tuple[str, type]]


class Matrix(ctypes.Structure):
    """A packed weight: see engine/cpu/packing.py."""

    _fields_: ClassVar[_Fields] = [
        *((name, _SIZE) for name in ("kind", "outputs", "inputs", "group", "half_scales")),
        *((name, _POINTER) for name in ("data", "scales", "mins", "bias", "columns")),
    ]


class Layer(ctypes.Structure):
    """The weights of one layer; a null pointer: there is none."""

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
    """The shape of the decoder and its layers."""

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
                "experts_normalised",
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
    """The memory of the KV blocks: see engine/cpu/kv_codes.h."""

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
    """The tokens of one step."""

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
    """Where the values lie; they must be contiguous and be kept alive."""
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        assert values.is_contiguous()
        return values.data_ptr()
    assert values.flags.c_contiguous
    return values.ctypes.data
