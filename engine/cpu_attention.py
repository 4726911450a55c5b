"""Attention over the paged cache on the CPU: cpu_attention.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.cpu_library import cpu_library

AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(queries [queries, heads, dim], tables int64 [queries or 1, blocks], lengths int64 [queries],
layer) → like queries. All contiguous. A table of one row is shared by all queries; a length counts
the keys that a query attends to."""

_KEYS_AT_ONCE = 16
_WIDTH = 32


def attention_kernel(data: torch.Tensor) -> AttentionKernel | None:
    """The kernel over a cache's memory, or None where torch is to compute.

    ``data`` is ``engine.kv_cache.KvCache.data``.
    """
    _, _, _, kv_heads, block_size, dim = data.shape
    fits = block_size % _KEYS_AT_ONCE == 0 and dim % _WIDTH == 0
    if data.device.type != "cpu" or data.dtype != torch.bfloat16 or not fits:
        return None
    library = cpu_library()
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_long
    function = library.baton_attend
    function.argtypes = [pointer] * 5 + [size] * 7 + [ctypes.c_float, ctypes.c_int]
    function.restype = None

    def attend(
        queries: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Scores and sums in fp32."""
        out = torch.empty_like(queries)
        function(
            queries.data_ptr(),
            data.data_ptr() + layer * data.stride(1) * data.element_size(),
            out.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            queries.shape[0],
            tables.shape[1] if tables.shape[0] > 1 else 0,
            queries.shape[1],
            kv_heads,
            dim,
            block_size,
            data.stride(0),
            dim**-0.5,
            torch.get_num_threads(),
        )
        return out

    return attend
