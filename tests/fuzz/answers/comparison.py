"""Answers as clients get them, and what one calm engine answers instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.errors import BatonError
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import OfflineOutput, generate
from router.core.request import GenerationRequest, OutputDelta, ScoredToken, without_answer
from router.text.output_processor import OutputProcessor
from router.text.reasoning_counter import reasoning_counter
from router.text.tokenizer import Tokenizer

TOLERANCE = 1e-4
"""Of log probabilities and embeddings. The tokens themselves must be equal."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    reasoning_tokens: int = 0
    fingerprint: str = ""
    """Fingerprint that the last delta names; empty before it has come."""


class Malformed(Exception):
    """A stream of deltas that breaks the dispatcher's own rules."""


@dataclass(slots=True)
class Answer:
    """An answer, as far as it has come."""

    choices: list[Choice]
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    embedding: Sequence[float] = ()
    cached: list[int] = field(default_factory=list)
    """Each report of cached prompt tokens."""
    error: BatonError | None = None
    began: float = 0.0
    ended: float = 0.0
    """In seconds of the round."""

    @classmethod
    def empty(cls, request: GenerationRequest) -> Answer:
        """Return what a client has before anything has come."""
        return cls([Choice() for _ in range(request.choices)])

    @property
    def is_whole(self) -> bool:
        """Whether every choice has ended."""
        return all(one.finish_reason is not None for one in self.choices)

    def add(self, delta: OutputDelta) -> None:
        """Add a delta. Raises Malformed."""
        choice = self.choices[delta.choice]
        if choice.finish_reason is not None:
            raise Malformed(f"choice {delta.choice} has a delta after its finish reason")
        if self.prompt_logprobs and delta.prompt_logprobs:
            raise Malformed("the prompt's log probabilities come twice")
        if delta.accepted_drafts > len(delta.token_ids):
            raise Malformed(f"{delta.accepted_drafts} drafts in {len(delta.token_ids)} tokens")
        choice.token_ids += delta.token_ids
        choice.text += delta.text
        choice.scored += delta.scored
        choice.reasoning_tokens += delta.reasoning_tokens
        choice.finish_reason, choice.stop_string = delta.finish_reason, delta.stop_string
        if choice.fingerprint not in ("", delta.fingerprint):
            raise Malformed(f"{choice.fingerprint} and {delta.fingerprint} give one choice")
        choice.fingerprint = delta.fingerprint
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.embedding = self.embedding or delta.embedding
        if delta.cached_prompt_tokens:
            self.cached.append(delta.cached_prompt_tokens)

    async def read(
        self,
        deltas: AsyncIterator[OutputDelta],
        max_deltas: int | None = None,
    ) -> None:
        """Add the deltas, until the answer has ended or ``max_deltas`` have come. Raises Malformed
        for a stream that ends before the answer has."""
        count = 0
        async for delta in deltas:
            self.add(delta)
            count += 1
            if count == max_deltas:
                return
        if not self.is_whole:
            raise Malformed("the stream ends before every choice has a finish reason")


class Reference:
    """One engine alone, which answers as the cluster must.

    It computes one choice at a time, with nothing cached, and scores prompts apart: what a choice,
    a neighbor in its batch or a score does to another one cannot show here. Used by one thread at a
    time."""

    def __init__(self, model: Path, settings: EngineSettings) -> None:
        self.engine: Engine = build_engine(settings)
        self._tokenizer = Tokenizer.load(model)
        self._known: dict[GenerationRequest, Answer] = {}

    def answer(self, request: GenerationRequest) -> Answer:
        """Return the right answer to a request, which ``error`` may be. Its id does not matter."""
        request = replace(request, request_id="")
        if request not in self._known:
            self._known[request] = self._answer(request)
        return self._known[request]

    def forget(self) -> None:
        """Forget all answers."""
        self._known.clear()

    def _answer(self, request: GenerationRequest) -> Answer:
        answer = Answer.empty(request)
        try:
            for number in range(request.choices):
                self._add_choice(request, number, answer)
        except BatonError as error:
            answer.error = error
        if request.embeds or request.scores_prompt:
            scored = replace(request.sampling, max_tokens=1, grammar=None)
            output = self._generate(request, 0, scored, embeds=request.embeds)
            answer.prompt_logprobs, answer.embedding = output.prompt_logprobs, output.embedding
        return answer

    def _add_choice(self, request: GenerationRequest, number: int, answer: Answer) -> None:
        output = self._generate(request, number, replace(request.sampling, prompt_logprobs=None))
        processor = self._processor(request)
        for place, token in enumerate(output.token_ids):
            is_last = place == len(output.token_ids) - 1
            delta = processor.push(
                [token],
                output.finish_reason if is_last else None,
                logprobs=output.logprobs[place : place + 1],
            )
            if delta is not None:
                if request.embeds or request.prompt_only:
                    delta = without_answer(delta)
                delta.choice = number
                answer.add(delta)
            if processor.finished:
                return

    def _generate(
        self,
        request: GenerationRequest,
        number: int,
        sampling: SamplingParams,
        *,
        embeds: bool = False,
    ) -> OfflineOutput:
        prompt = request.prompt_ids
        spec = SequenceSpec(
            *("reference", 0, "", prompt, len(prompt), sampling),
            choice=number,
            embeds=embeds,
            reasoning=request.reasoning_span,
        )
        self.engine.pool.drop_cache()
        return generate(self.engine, [spec])[0]

    def _processor(self, request: GenerationRequest) -> OutputProcessor:
        sampling = request.sampling
        eos = self._tokenizer.eos_ids if sampling.ends_at_eos else frozenset()
        return OutputProcessor(
            self._tokenizer.detokenizer(request.prompt_ids, request.shown_ids),
            sampling.stop,
            eos | set(sampling.stop_token_ids),
            sampling.min_tokens,
            include_stop=request.shows_stop_string,
            reasoning=reasoning_counter(request.reasoning_markers, request.begins_in),
        )


def difference(request: GenerationRequest, found: Answer, expected: Answer) -> str:
    """Say how a whole answer differs from what it must be; "" where it does not."""
    for number, (mine, theirs) in enumerate(zip(found.choices, expected.choices, strict=True)):
        told = _of_choice(mine, theirs)
        if told:
            return f"choice {number}: {told}"
    told = _of_scores(found.prompt_logprobs, expected.prompt_logprobs)
    if told:
        return f"prompt's {told}"
    if len(found.embedding) != len(expected.embedding) or any(
        abs(a - b) > TOLERANCE for a, b in zip(found.embedding, expected.embedding, strict=True)
    ):
        return f"embedding {found.embedding}, expected {expected.embedding}"
    return _of_usage(request, found)


def is_beginning(found: Answer, expected: Answer) -> bool:
    """Whether all that has come is how the right answer begins."""
    return all(
        mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
        and theirs.text.startswith(mine.text)
        for mine, theirs in zip(found.choices, expected.choices, strict=True)
    )


def _of_choice(found: Choice, expected: Choice) -> str:
    if found.token_ids != expected.token_ids:
        pairs = zip(found.token_ids, expected.token_ids, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            return f"{len(found.token_ids)} tokens, expected {len(expected.token_ids)}"
        return (
            f"token {place} is {found.token_ids[place]}, expected {expected.token_ids[place]}"
            f" (of {len(found.token_ids)}, expected {len(expected.token_ids)})"
        )
    for name in ("text", "finish_reason", "stop_string", "reasoning_tokens"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        if mine != theirs:
            return f"{name} {mine!r}, expected {theirs!r}"
    mine = [(one.token_id, one.offset, one.hidden) for one in found.scored]
    theirs = [(one.token_id, one.offset, one.hidden) for one in expected.scored]
    if mine != theirs:
        return f"scored tokens {mine}, expected {theirs}"
    return _of_scores(
        [one.logprobs for one in found.scored], [one.logprobs for one in expected.scored]
    )


def _of_scores(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> str:
    if len(found) != len(expected):
        return f"log probabilities of {len(found)} tokens, expected {len(expected)}"
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not _same(mine, theirs):
            return f"log probabilities of token {place}: {mine}, expected {theirs}"
    return ""


def _same(found: TokenLogprobs, expected: TokenLogprobs) -> bool:
    return (
        abs(found.logprob - expected.logprob) <= TOLERANCE
        and [token for token, _ in found.top] == [token for token, _ in expected.top]
        and all(
            abs(a - b) <= TOLERANCE for (_, a), (_, b) in zip(found.top, expected.top, strict=True)
        )
    )


def _of_usage(request: GenerationRequest, found: Answer) -> str:
    """Of cached tokens only the bounds are known: what is cached depends on what came before."""
    if len(found.cached) > 1:
        return f"cached prompt tokens are told {len(found.cached)} times: {found.cached}"
    cached, prompt = sum(found.cached), len(request.prompt_ids)
    if not 0 <= cached < prompt:
        return f"{cached} cached tokens of a prompt of {prompt}"
    if cached and request.without_prefix_cache:
        return f"{cached} cached tokens without a prefix cache"
    return ""
