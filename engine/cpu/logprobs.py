"""Log probabilities on the CPU: logprobs.cpp. ``engine.sampling.logprobs`` is the definition."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from baton.logprobs import TokenLogprobs
from engine.cpu.library import cpu_library
from engine.cpu.structs import address
from engine.sampling.logprobs import Scored, Scorer


def cpu_logprobs() -> Scorer | None:
    """The C++ scorer, or None where torch is to compute."""
    library = cpu_library()
    return None if library is None else _CpuLogprobs(library)


class _CpuLogprobs:
    """An ``engine.sampling.logprobs.Scorer`` of logits on the CPU; runs without the interpreter's
    lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._score = library.baton_logprobs
        self._score.argtypes = [
            ctypes.c_void_p,
            *([ctypes.c_int64] * 3),
            *([ctypes.c_void_p] * 3),
            ctypes.c_int64,
            *([ctypes.c_void_p] * 3),
        ]
        self._score.restype = None

    def __call__(self, logits: torch.Tensor, wanted: Sequence[Scored]) -> list[TokenLogprobs]:
        assert logits.dtype == torch.float32
        assert logits.device.type == "cpu"
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        vocab, count = logits.shape[1], len(wanted)
        places = np.array([(each.row, each.token_id, each.top) for each in wanted], dtype=np.int64)
        rows, tokens, tops = places.reshape(count, 3).T.copy()
        # The C++ trusts what it is given; torch would raise for what is not there.
        for places_of, most in ((rows, len(logits)), (tokens, vocab)):
            if count and not 0 <= places_of.min() <= places_of.max() < most:
                raise ValueError("a token or a row of logits that is not there")
        width = int(min(tops.max(initial=0), vocab))
        own = np.empty(count, dtype=np.float32)
        ids = np.empty((count, width), dtype=np.int32)
        values = np.empty((count, width), dtype=np.float32)
        arrays = (rows, tokens, tops)
        self._score(
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            count,
            *(address(array) for array in arrays),
            width,
            *(address(array) for array in (own, ids, values)),
        )
        found = zip(own.tolist(), ids.tolist(), values.tolist(), tops.tolist(), strict=True)
        return [
            TokenLogprobs(logprob, tuple(zip(token_ids[:top], top_values[:top], strict=True)))
            for logprob, token_ids, top_values, top in found
        ]
