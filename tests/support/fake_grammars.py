"""A grammar without a library: which tokens may come depends on the last one and on the place."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from engine.sampling.grammar_state import pack


class FakeMatcher:
    """A token is allowed where (token + 5 * last + place) % 7 is 0 or 3; nothing ends."""

    def __init__(self, vocab_size: int, taken: tuple[int, ...] = ()) -> None:
        self._vocab_size = vocab_size
        self._taken = list(taken)
        self._broken = ""

    def _allowed(self) -> npt.NDArray[np.bool_]:
        last = self._taken[-1] if self._taken else 0
        rest = (np.arange(self._vocab_size) + 5 * last + len(self._taken)) % 7
        return np.isin(rest, (0, 3))

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        mask = pack(self._allowed())
        assert mask.nbytes == trg_byte_size
        ctypes.memmove(trg_pointer, mask.ctypes.data, mask.nbytes)

    def consume_token(self, sampled_token: int) -> bool:
        if not 0 <= sampled_token < self._vocab_size or not self._allowed()[sampled_token]:
            self._broken = f"token {sampled_token} may not come"
        self._taken.append(sampled_token)
        return not self._broken

    def rollback(self, num_tokens: int) -> bool:
        del self._taken[len(self._taken) - num_tokens :]
        return not self._broken

    def is_stopped(self) -> bool:
        return bool(self._broken)

    def is_error(self) -> bool:
        return bool(self._broken)

    def get_error(self) -> str:
        return self._broken

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self._vocab_size, tuple(self._taken))
