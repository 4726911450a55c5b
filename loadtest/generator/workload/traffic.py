"""Makes all requests of a run, in order. Pure.

Content and schedule are independent: any source works with any arrival process, or in a closed
loop. Runs of one seed have the same lengths in the same order and the same pattern of arrivals, so
that two rates differ only by their rate. Another run's prompts have other text, so that no cache
has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import FilePrompt, Form, PlannedRequest, PromptMaker
from planning.common.traces import Trace

_LENGTHS, _ORDER, _ANSWERS = 2, 3, 4
"""Numbers that seed the random generators of prompt lengths, of the order of prompts, and of answer
lengths. They differ, so that the three are independent."""


class Source(ABC):
    """Makes the requests of a run by their numbers. The same seed, run and number give the same
    request."""

    @abstractmethod
    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Return the request of this number, counted from 0."""


class DrawnLengths(Source):
    """Makes prompts of random content, with lengths drawn from distributions."""

    _DRAWN = 1024
    """Number of prompt and answer lengths that are drawn from the distributions at a time."""

    def __init__(
        self, inputs: Lengths, outputs: Lengths, form: Form, *, seed: int, run: int = 0
    ) -> None:
        self._parts = (inputs, outputs)
        self._maker = PromptMaker(form, seed, run)
        self._generator = np.random.default_rng((seed, _LENGTHS))
        self._lengths: list[tuple[int, int]] = []

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Implement ``Source``."""
        while number >= len(self._lengths):
            inputs, outputs = (part.draw(self._DRAWN, self._generator) for part in self._parts)
            self._lengths.extend(zip(inputs.tolist(), outputs.tolist(), strict=True))
        tokens, answer = self._lengths[number]
        return PlannedRequest(number, due_s, self._maker.fresh(number, tokens), tokens, answer)


class PromptList(Source):
    """Takes the prompts of a file, again and again, in a new random order each time."""

    def __init__(self, prompts: Sequence[FilePrompt], outputs: Lengths, *, seed: int) -> None:
        self._prompts = prompts
        self._outputs = outputs
        self._seed = seed

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Implement ``Source``."""
        turn, place = divmod(number, len(self._prompts))
        order = np.random.default_rng((self._seed, _ORDER, turn)).permutation(len(self._prompts))
        prompt = self._prompts[order[place]]
        answer = prompt.output_tokens
        if answer is None:
            generator = np.random.default_rng((self._seed, _ANSWERS, number))
            answer = int(self._outputs.draw(1, generator)[0])
        return PlannedRequest(number, due_s, prompt.text, prompt.input_tokens, answer)


class TraceRows(Source):
    """Takes lengths and prefixes from a trace, from its first row on. After the last row it starts
    again.

    Prompts of different passes through the trace share no prefixes.
    """

    def __init__(self, trace: Trace, form: Form, *, seed: int, run: int = 0) -> None:
        self._trace = trace
        self._form: Form = form
        self._seed = (seed, run)
        self._turn = 0
        self._maker = PromptMaker(form, *self._seed, 0)

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Implement ``Source``."""
        turn, place = divmod(number, len(self._trace.requests))
        if turn != self._turn:
            self._turn, self._maker = turn, PromptMaker(self._form, *self._seed, turn)
        row = self._trace.requests[place]
        prompt = self._maker.of_blocks(
            number, row.input_tokens, row.block_hashes, self._trace.block_tokens
        )
        return PlannedRequest(number, due_s, prompt, row.input_tokens, row.output_tokens)


def planned(source: Source, times_s: Sequence[float]) -> Iterator[PlannedRequest]:
    """Yield one request of ``source`` for each of ``times_s``. A request is due at its time."""
    for number, due_s in enumerate(times_s):
        yield source.request(number, due_s)
