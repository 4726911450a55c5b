"""Makes the contents and lookups of `loadtest.cluster.index_bench`.

Prompts are ``PROMPT_BLOCKS`` blocks long and begin with the same ``COMMON_BLOCKS``, which every
worker holds: a system prompt. Half of the (block, worker) pairs belong to prompts that 16 to 64
workers hold, each at least 128 blocks of it; the others to prompts that one worker holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baton.hashing import HASH_BYTES

PROMPT_BLOCKS = 256
COMMON_BLOCKS = 2
DEEP_BLOCKS = 128
DEEP_WORKERS = 16
_MAX_HOLDERS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to look up: its block hashes, and the workers that hold more of its leading blocks
    than the system prompt, which all workers hold."""

    hashes: list[bytes]
    holders: dict[int, int]
    """For each worker number, the number of leading blocks of the prompt that the worker holds."""

    @property
    def is_deep(self) -> bool:
        """Whether at least 16 workers hold at least 128 blocks of the prompt."""
        return sum(depth >= DEEP_BLOCKS for depth in self.holders.values()) >= DEEP_WORKERS


@dataclass(frozen=True, slots=True)
class _Prompt:
    digests: bytes
    """Block hashes of the prompt, concatenated, without those of the prefix that all prompts
    share."""
    holders: dict[int, int]
    """For each worker number, the number of leading blocks of the prompt that the worker holds. The
    blocks that all prompts share are included."""


class IndexWorkload:
    """Random prompts, and the workers that hold their blocks. The same ``seed`` gives the same
    workload. Owned by the benchmark."""

    def __init__(self, workers: int, pairs: int, seed: int = 1) -> None:
        """``pairs`` is the approximate number of (block, worker) pairs in the index."""
        self._random = np.random.default_rng(seed)
        self._workers = workers
        self._common = self._random.bytes(COMMON_BLOCKS * HASH_BYTES)
        self._held: list[list[tuple[_Prompt, int]]] = [[] for _ in range(workers)]
        self.pairs = COMMON_BLOCKS * workers
        self._shared: list[_Prompt] = []
        while not self._shared or self.pairs < pairs // 2:
            self._shared.append(self._add(self._shared_holders()))
        self._private: list[_Prompt] = []
        while not self._private or self.pairs < pairs:
            holder = int(self._random.integers(workers))
            self._private.append(self._add({holder: PROMPT_BLOCKS}))

    def _shared_holders(self) -> dict[int, int]:
        most = min(_MAX_HOLDERS, self._workers)
        count = int(self._random.integers(min(DEEP_WORKERS, most), most + 1))
        chosen = self._random.choice(self._workers, count, replace=False)
        depths = self._random.integers(DEEP_BLOCKS, PROMPT_BLOCKS + 1, count)
        # Half of the chosen workers hold the whole prompt.
        depths[::2] = PROMPT_BLOCKS
        return dict(zip(chosen.tolist(), depths.tolist(), strict=True))

    def _add(self, holders: dict[int, int]) -> _Prompt:
        digests = self._random.bytes((PROMPT_BLOCKS - COMMON_BLOCKS) * HASH_BYTES)
        prompt = _Prompt(digests, holders)
        for worker, depth in holders.items():
            self._held[worker].append((prompt, depth))
            self.pairs += depth - COMMON_BLOCKS
        return prompt

    def held_by(self, worker: int) -> list[bytes]:
        """Return the hashes of all blocks that a worker holds."""
        hashes = _split(self._common)
        for prompt, depth in self._held[worker]:
            hashes += _split(prompt.digests[: (depth - COMMON_BLOCKS) * HASH_BYTES])
        return hashes

    def questions(self) -> Iterator[Question]:
        """Yield prompts to look up, without end.

        Every second prompt is one that several workers hold. The others are new, or continue a held
        prompt differently from a random block on.
        """
        while True:
            yield self._question(self._any_of(self._shared), PROMPT_BLOCKS)
            cut = int(self._random.integers(COMMON_BLOCKS, PROMPT_BLOCKS + 1))
            known = bool(self._random.integers(2))
            yield self._question(self._any_of(self._private), cut if known else COMMON_BLOCKS)

    def _any_of(self, prompts: list[_Prompt]) -> _Prompt:
        return prompts[int(self._random.integers(len(prompts)))]

    def _question(self, prompt: _Prompt, cut: int) -> Question:
        known = self._common + prompt.digests[: (cut - COMMON_BLOCKS) * HASH_BYTES]
        fresh = self._random.bytes((PROMPT_BLOCKS - cut) * HASH_BYTES)
        holders = {worker: min(depth, cut) for worker, depth in prompt.holders.items()}
        return Question(_split(known + fresh), holders)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + HASH_BYTES] for at in range(0, len(digests), HASH_BYTES)]
