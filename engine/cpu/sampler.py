"""Samples tokens and computes log probabilities on the CPU, with sampling.cpp and logprobs.cpp: one
call per step.

``engine.sampling.sampling.sample`` and ``engine.sampling.logprobs`` are the references; the tokens
are the same.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from baton.logprobs import TokenLogprobs
from engine.cpu.library import cpu_library
from engine.cpu.structs import address
from engine.sampling.logprobs import Scored, Scorer
from engine.sampling.sampling import SampleRow

_SEED_MASK = (1 << 64) - 1


class _Draw(ctypes.Structure):
    """Parameters of one row's draw: the struct of this name in sampling.cpp."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("mask", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_int64)
            for name in (
                "choice",
                "position",
                "top_k",
                "ids",
                "prompt",
                "output",
                "forbidden",
                "biased",
                "allowed",
                "biases",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "presence",
                "frequency",
                "repetition",
            )
        ),
    ]


def cpu_sampler() -> CpuSampler | None:
    """Make the C++ sampler; None if there is no C++ library, so that torch has to draw."""
    library = cpu_library()
    return None if library is None else CpuSampler(library)


class CpuSampler:
    """Draws the same tokens as ``engine.sampling.sampling.sample``, in C++. Only one thread may use
    it at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.threads = torch.get_num_threads()
        self._draw = library.baton_sampler_draw
        self._draw.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            *([ctypes.c_int64] * 3),
            ctypes.POINTER(_Draw),
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int64),
        ]
        self._draw.restype = None
        create, free = library.baton_sampler_new, library.baton_sampler_free
        create.argtypes = []
        create.restype = ctypes.c_void_p
        free.argtypes = [ctypes.c_void_p]
        free.restype = None
        self._sampler: int = create()
        # Not freed at the process's end: the engine thread may still use it.
        weakref.finalize(self, free, self._sampler).atexit = False
        self._prompts = _Prompts()

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads from the next call on."""
        self.threads = threads

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
        """Draw one token for each row of ``logits``, fp32 [rows, vocab_size] on the CPU.

        The logits do not change. Releases the interpreter's lock.
        """
        assert logits.dtype == torch.float32
        assert logits.device.type == "cpu"
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        ids, biases = array("i"), array("f")
        self._prompts.begin_step()
        draws = (_Draw * len(rows))(*(self._described(row, ids, biases) for row in rows))
        tokens = (ctypes.c_int64 * len(rows))()
        self._draw(
            self._sampler,
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            len(rows),
            draws,
            ids.buffer_info()[0],
            biases.buffer_info()[0],
            self.threads,
            tokens,
        )
        return list(tokens)

    def _described(self, row: SampleRow, ids: array[int], biases: array[float]) -> _Draw:
        """Make the draw parameters of a row. The tokens and biases to which the parameters refer
        are appended to ``ids`` and ``biases``."""
        s = row.sampling
        position = len(row.token_ids)
        at, biases_at = len(ids), len(biases)
        counts = self._lists(row, ids, biases) if row.adjusted else (0, 0, 0, 0, 0)
        return _Draw(
            # The rows keep their masks alive until the call has ended.
            None if row.mask is None else row.mask.ctypes.data,
            s.seed & _SEED_MASK,
            row.choice,
            position,
            s.top_k,
            at,
            *counts,
            biases_at,
            s.temperature,
            s.top_p,
            s.min_p,
            s.presence_penalty,
            s.frequency_penalty,
            s.repetition_penalty,
        )

    def _lists(
        self, row: SampleRow, ids: array[int], biases: array[float]
    ) -> tuple[int, int, int, int, int]:
        """Append to ``ids`` and ``biases`` the token ids and numbers that a row's penalties and
        biases use. Returns the numbers of prompt, output, forbidden, biased and allowed tokens."""
        s, output = row.sampling, row.token_ids[row.prompt_length :]
        repeats = s.repetition_penalty != 1.0
        prompt = self._prompts.unique(row) if repeats else array("i")
        forbidden = row.forbidden
        if not (repeats or s.presence_penalty or s.frequency_penalty):
            output = []
        ids.extend(prompt)
        ids.extend(output)
        ids.extend(forbidden)
        ids.extend(token for token, _ in s.logit_bias)
        ids.extend(s.allowed_token_ids)
        biases.extend(bias for _, bias in s.logit_bias)
        biased, allowed = len(s.logit_bias), len(s.allowed_token_ids)
        return len(prompt), len(output), len(forbidden), biased, allowed


class _Prompts:
    """Cache of the distinct tokens of each prompt, which are computed once per sequence and not at
    each step.

    It relies on each sequence having one token list, which only grows after the prompt. Entries
    that a step did not use are dropped at the end of the next step.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[list[int], int, array[int]]] = {}
        self._now: dict[int, tuple[list[int], int, array[int]]] = {}

    def begin_step(self) -> None:
        self._last, self._now = self._now, {}

    def unique(self, row: SampleRow) -> array[int]:
        """Return the distinct tokens of a row's prompt."""
        key = id(row.token_ids)
        found = self._now.get(key) or self._last.get(key)
        # The entry keeps the list alive, so that no other list can have its id.
        if found is None or found[1] != row.prompt_length:
            prompt = row.token_ids[: row.prompt_length]
            found = row.token_ids, row.prompt_length, array("i", set(prompt))
        self._now[key] = found
        return found[2]


def cpu_logprobs() -> Scorer | None:
    """Make the C++ scorer; None if there is no C++ library, so that torch has to compute."""
    library = cpu_library()
    return None if library is None else _CpuLogprobs(library)


class _CpuLogprobs:
    """Computes log probabilities from logits on the CPU, in C++. Implements
    ``engine.sampling.logprobs.Scorer``. It releases the interpreter's lock."""

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
        # The C++ code does not check its input; torch would raise for a missing row or token.
        for places_of, most in ((rows, len(logits)), (tokens, vocab)):
            if count and not 0 <= places_of.min() <= places_of.max() < most:
                raise ValueError("unknown token or row of logits")
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
