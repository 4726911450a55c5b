"""AWQ checkpoints in AutoAWQ's ``gemm`` layout (Lin et al., 2023, arXiv:2306.00978).

Of a module: ``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8], both packed
along the outputs; ``scales`` floating [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.quantization.affine import affine_weight, unpack_words
from engine.quantization.weight import QuantizedWeight

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word in which each of its eight outputs lies: the even ones come first."""


def read_awq(parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """``parts`` by the names above. Raises KeyError for a missing part, ValueError for a misfit."""
    return affine_weight(
        _outputs(parts["qweight"]).t(),
        _BITS,
        parts["scales"].t(),
        _outputs(parts["qzeros"]).t(),
    )


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] → uint8 [n, out]."""
    words = unpack_words(packed, _BITS).view(packed.shape[0], -1, len(_PLACES))
    return words[:, :, list(_PLACES)].flatten(1)
