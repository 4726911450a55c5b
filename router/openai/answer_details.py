"""Data that a client requests in addition to an answer's text, in the formats of the two endpoints.

The data are log probabilities, token ids, and an echo of the prompt. An answer of plain text has
none of them and no cost from them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from baton.logprobs import PackedTop, TokenLogprobs
from router.core.request import GenerationRequest, OutputDelta, ScoredToken
from router.http.json_stream import Items
from router.http.sse import to_json
from router.openai.options import AnswerOptions
from router.openai.token_shapes import TokenShapes
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChunkExtras:
    """Fields that the details add to an event of a stream, as JSON."""

    logprobs: str = "null"
    of_choice: str = ""
    """JSON fields that are added to the choice in the event, each with a comma before it."""
    of_answer: str = ""
    """JSON fields that are added to the event outside of its choice, each with a comma before
    it."""

    @property
    def empty(self) -> bool:
        return self.logprobs == "null" and not (self.of_choice or self.of_answer)


NOTHING = ChunkExtras()


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt in the form in which its text and tokens are returned to the client."""

    token_ids: tuple[int, ...]
    text: str
    offsets: Sequence[int]
    """For each token of the prompt, the number of characters of text before the token."""
    logprobs: Sequence[TokenLogprobs] = ()


class KeptScores:
    """Scored tokens of an answer that is not streamed, in columns: objects would need 20 times as
    much memory.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._logprobs = array("f")
        self._offsets = array("I")
        self._hidden = bytearray()
        self._tops = bytearray()
        self._ends = array("I")
        """End of each token's most likely tokens in ``_tops``, in bytes."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, scored: Iterable[ScoredToken]) -> None:
        """Append scored tokens of the answer."""
        for token in scored:
            top = token.logprobs.top
            packed = top if isinstance(top, PackedTop) else PackedTop.of(top)
            self._token_ids.append(token.token_id)
            self._logprobs.append(token.logprobs.logprob)
            self._offsets.append(token.offset)
            self._hidden.append(token.hidden)
            self._tops += packed.packed
            self._ends.append(len(self._tops))

    def __iter__(self) -> Iterator[ScoredToken]:
        begin = 0
        columns = (self._token_ids, self._logprobs, self._offsets, self._hidden, self._ends)
        for token_id, logprob, offset, hidden, end in zip(*columns, strict=True):
            top = PackedTop(bytes(self._tops[begin:end]))
            yield ScoredToken(token_id, TokenLogprobs(logprob, top), offset, bool(hidden))
            begin = end

    @property
    def mean(self) -> float:
        """Mean log probability of the tokens; 0 if there are none."""
        return sum(self._logprobs) / max(1, len(self))


@dataclass(slots=True)
class Kept:
    """Data collected from a choice's deltas, for an answer that is not streamed."""

    scores: KeptScores = field(default_factory=KeptScores)
    token_ids: array[int] = field(default_factory=lambda: array("I"))


class AnswerDetails:
    """The requested log probabilities, token ids and echoes of one request. Choices are numbered
    across its prompts, in order."""

    def __init__(
        self,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        texts: Sequence[str | None],
        *,
        is_chat: bool,
    ) -> None:
        """Create the details. ``texts`` holds each prompt as the client wrote it; None for a prompt
        of token ids."""
        self.options = options
        self._shapes = TokenShapes(tokenizer)
        self._is_chat = is_chat
        self._prompts = [
            echoed_prompt(tokenizer, request.prompt_ids, text)
            if options.echo
            else EchoedPrompt(request.prompt_ids, "", [])
            for request, text in zip(requests, texts, strict=True)
        ]
        self._kept = [Kept() for _ in requests for _ in range(options.best_of)]

    def _prompt(self, place: int) -> EchoedPrompt:
        return self._prompts[place // self.options.best_of]

    def echo(self, place: int) -> str:
        """Return the text of the prompt that is shown before the choice with the number
        ``place``."""
        return self._prompt(place).text

    def keep(self, place: int, delta: OutputDelta) -> None:
        """Store the details of a delta of the choice with the number ``place``, until ``complete``
        is called."""
        self._take_prompt_logprobs(place, delta)
        self._kept[place].scores.add(delta.scored)
        if self.options.token_ids:
            self._kept[place].token_ids.extend(delta.token_ids)

    def _take_prompt_logprobs(self, place: int, delta: OutputDelta) -> None:
        if delta.prompt_logprobs:
            self._prompt(place).logprobs = delta.prompt_logprobs

    # Streams

    def chunk(self, place: int, delta: OutputDelta, *, first: bool) -> ChunkExtras:
        """Return the fields that the details add to the event of a delta of the choice with the
        number ``place``."""
        self._take_prompt_logprobs(place, delta)
        options, of_choice, of_answer = self.options, "", ""
        logprobs = self._chunk_logprobs(place, delta, first=first)
        if options.token_ids:
            if first:
                prompt = f',"prompt_token_ids":{to_json(self._prompt(place).token_ids)}'
                of_answer, of_choice = (prompt, "") if self._is_chat else ("", prompt)
            if delta.token_ids:
                of_choice += f',"token_ids":{to_json(delta.token_ids)}'
        return ChunkExtras("null" if logprobs is None else to_json(logprobs), of_choice, of_answer)

    def _chunk_logprobs(
        self, place: int, delta: OutputDelta, *, first: bool
    ) -> dict[str, Any] | None:
        options = self.options
        if options.logprobs is None:
            return None
        if self._is_chat:
            content = list(self._shapes.chat(delta.scored))
            return {"content": content, "refusal": None} if content else None
        columns = self._completion_logprobs(place, delta.scored, prompt=first)
        found = {name: list(column) for name, column in columns.items()}
        return found if found["tokens"] else None

    def _completion_logprobs(
        self, place: int, scored: Iterable[ScoredToken], *, prompt: bool
    ) -> dict[str, Iterator[Any]]:
        top, echoed = self.options.logprobs or 0, self._prompt(place)
        found = self._shapes.completion(scored, len(echoed.text), top)
        if prompt and self.options.echo:
            before = self._shapes.completion_prompt(
                echoed.token_ids, echoed.offsets, echoed.logprobs, top
            )
            return {name: chain(before[name], column) for name, column in found.items()}
        return found

    # Whole answers

    def complete(self, body: dict[str, Any], places: Sequence[int]) -> None:
        """Add the details to the body of an answer. Its choices are those with the numbers
        ``places``.

        Long lists in the body are ``Items``.
        """
        for choice, place in zip(body["choices"], places, strict=True):
            self._complete_choice(choice, place)
        if self._is_chat:
            self._add_prompt(body, 0)

    def _complete_choice(self, choice: dict[str, Any], place: int) -> None:
        options, kept = self.options, self._kept[place]
        if self._is_chat:
            if options.logprobs is not None:
                content = self._shapes.chat(kept.scores)
                choice["logprobs"] = {"content": Items(content), "refusal": None}
        else:
            choice["text"] = self.echo(place) + choice["text"]
            if options.logprobs is not None:
                columns = self._completion_logprobs(place, kept.scores, prompt=True)
                choice["logprobs"] = {name: Items(column) for name, column in columns.items()}
            self._add_prompt(choice, place)
        if options.token_ids:
            choice["token_ids"] = Items(kept.token_ids)

    def _add_prompt(self, where: dict[str, Any], place: int) -> None:
        options, prompt = self.options, self._prompt(place)
        if options.prompt_logprobs is not None:
            scores = self._shapes.prompt_logprobs(
                prompt.token_ids, prompt.logprobs, options.prompt_logprobs
            )
            where["prompt_logprobs"] = Items(scores)
        if options.token_ids:
            where["prompt_token_ids"] = Items(prompt.token_ids)

    def best(self) -> list[int]:
        """Return the numbers of the choices that are the ``n`` most likely answers to each prompt,
        most likely first.

        Likelihood is the mean log probability of an answer's tokens.
        """
        count, n = self.options.best_of, self.options.n
        if n == count:
            return list(range(len(self._kept)))
        chosen = []
        for first in range(0, len(self._kept), count):
            places = range(first, first + count)
            chosen += sorted(places, key=lambda place: -self._kept[place].scores.mean)[:n]
        return chosen


def echoed_prompt(
    tokenizer: Tokenizer, token_ids: tuple[int, ...], text: str | None
) -> EchoedPrompt:
    """Detokenize a prompt with the names of special tokens, and locate its tokens in the text.

    ``text`` is what the client wrote: it has no special tokens that were added at its start.
    """
    detokenizer = tokenizer.detokenizer(special_tokens=True)
    pieces: list[str] = []
    offsets = array("I")
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        piece = detokenizer.step(token_id)
        added = text is not None and tokenizer.is_special(token_id)
        if added and not (text or "").startswith(piece, at):
            continue
        pieces.append(piece)
        at += len(piece)
    pieces.append(detokenizer.flush())
    return EchoedPrompt(token_ids, "".join(pieces) if text is None else text, offsets)
