"""GPTQ checkpoints: the layout of AutoGPTQ and its successor GPTQModel.

Of a module: ``qweight`` int32 [in * bits / 32, out], packed along the inputs; ``qzeros`` int32
[groups, out * bits / 32], packed along the outputs; ``scales`` floating [groups, out]; ``g_idx``
int32 [in], each input's group (Frantar et al., 2022, arXiv:2210.17323, call its use act-order).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.quantization.affine import affine_weight, unpack_words
from engine.quantization.weight import QuantizedWeight


def read_gptq(parts: Mapping[str, torch.Tensor], bits: int, *, v2: bool) -> QuantizedWeight:
    """``parts`` by the names above; ``bits`` is 4 or 8.

    The format ``gptq`` keeps each zero point less one, ``gptq_v2`` (``v2``) as it is. The sum wraps
    at 2^bits, as it does in AutoGPTQ's kernels. Raises KeyError for a missing part, ValueError for
    one that does not fit.
    """
    codes = unpack_words(parts["qweight"].t(), bits)
    scales = parts["scales"].t()
    zeros = unpack_words(parts["qzeros"], bits).t()[: scales.shape[0]].int()
    if not v2:
        zeros = zeros + 1 & (1 << bits) - 1
    return affine_weight(codes, bits, scales, zeros, parts.get("g_idx"))
