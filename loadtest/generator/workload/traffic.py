"""All requests of a run, in the order in which they are to be sent. Pure.

What requests are, and when they are due, are two questions: any source can be sent by any process
of arrivals, or in a closed loop. Runs of one seed have the same lengths in the same order and the
same pattern of arrivals, so that two rates differ by their rate alone; another run's prompts are of
other text, so that no cache knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import FilePrompt, Form, PlannedRequest, PromptMaker
from planning.common.traces import Trace

_LENGTHS, _ORDER, _ANSWERS = 2, 3, 4
"""What is drawn from a seed, so that no two things are drawn alike."""


class Source(ABC):
    """Makes the request that has a number: the same for the same seed and run."""

    @abstractmethod
    def request(self, number: int, due_s: float) -> PlannedRequest:
        """The request ``number``, counted from 0."""


class DrawnLengths(Source):
    """Prompts of random content; lengths from distributions."""

    _DRAWN = 1024
    """Lengths are drawn so many at a time."""

    def __init__(
        self, inputs: Lengths, outputs: Lengths, form: Form, *, seed: int, run: int = 0
    ) -> None:
        self._parts = (inputs, outputs)
        self._maker = PromptMaker(form, seed, run)
        self._generator = np.random.default_rng((seed, _LENGTHS))
        self._lengths: list[tuple[int, int]] = []

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """See ``Source``."""
        while number >= len(self._lengths):
            inputs, outputs = (part.draw(self._DRAWN, self._generator) for part in self._parts)
            self._lengths.extend(zip(inputs.tolist(), outputs.tolist(), strict=True))
        tokens, answer = self._lengths[number]
        return PlannedRequest(number, due_s, self._maker.fresh(number, tokens), tokens, answer)


class PromptList(Source):
    """The prompts of a file, over and over, in an order that is drawn anew each time."""

    def __init__(self, prompts: Sequence[FilePrompt], outputs: Lengths, *, seed: int) -> None:
        self._prompts = prompts
        self._outputs = outputs
        self._seed = seed

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """See ``Source``."""
        turn, place = divmod(number, len(self._prompts))
        order = np.random.default_rng((self._seed, _ORDER, turn)).permutation(len(self._prompts))
        prompt = self._prompts[order[place]]
        answer = prompt.output_tokens
        if answer is None:
            generator = np.random.default_rng((self._seed, _ANSWERS, number))
            answer = int(self._outputs.draw(1, generator)[0])
        return PlannedRequest(number, due_s, prompt.text, prompt.input_tokens, answer)


class TraceRows(Source):
    """A trace's lengths and prefixes, from its first row on; at its end it begins anew.

    What comes in another turn shares no prefix with those before.
    """

    def __init__(self, trace: Trace, form: Form, *, seed: int, run: int = 0) -> None:
        self._trace = trace
        self._form: Form = form
        self._seed = (seed, run)
        self._turn = 0
        self._maker = PromptMaker(form, *self._seed, 0)

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """See ``Source``."""
        turn, place = divmod(number, len(self._trace.requests))
        if turn != self._turn:
            self._turn, self._maker = turn, PromptMaker(self._form, *self._seed, turn)
        row = self._trace.requests[place]
        prompt = self._maker.of_blocks(
            number, row.input_tokens, row.block_hashes, self._trace.block_tokens
        )
        return PlannedRequest(number, due_s, prompt, row.input_tokens, row.output_tokens)


def planned(source: Source, times_s: Sequence[float]) -> Iterator[PlannedRequest]:
    """A request for each of those times."""
    for number, due_s in enumerate(times_s):
        yield source.request(number, due_s)
