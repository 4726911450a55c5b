"""What an answer has beside its text, where the client asks for it.

Log probabilities, token ids, an echo of the prompt; in the shapes of the two endpoints. An answer
that is plain text has none of this, and pays for none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.logprobs import TokenLogprobs
from router.core.request import GenerationRequest, OutputDelta, ScoredToken
from router.http.sse import to_json
from router.openai.options import AnswerOptions
from router.openai.token_shapes import TokenShapes
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChunkExtras:
    """What an event has beside its text, as JSON."""

    logprobs: str = "null"
    of_choice: str = ""
    """More fields of the choice, each with a comma before it."""
    of_answer: str = ""
    """More fields of the whole."""

    @property
    def empty(self) -> bool:
        return self.logprobs == "null" and not (self.of_choice or self.of_answer)


NOTHING = ChunkExtras()


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt as its client is shown it."""

    token_ids: tuple[int, ...]
    text: str
    offsets: list[int]
    """Of each token, the characters before it."""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class Kept:
    """What a choice's deltas have brought, for an answer that is not streamed."""

    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class AnswerDetails:
    """Of one request. Choices have their places: those of the first prompt, of the second, …"""

    def __init__(
        self,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        texts: Sequence[str | None],
        *,
        is_chat: bool,
    ) -> None:
        """``texts``: each prompt as the client has written it, None for token ids."""
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
        """The text before a choice's first."""
        return self._prompt(place).text

    def keep(self, place: int, delta: OutputDelta) -> None:
        """Remember a delta for ``complete``."""
        self._hear(place, delta)
        self._kept[place].scored += delta.scored
        self._kept[place].token_ids += delta.token_ids

    def _hear(self, place: int, delta: OutputDelta) -> None:
        if delta.prompt_logprobs:
            self._prompt(place).logprobs = delta.prompt_logprobs

    # Streams

    def chunk(self, place: int, delta: OutputDelta, *, first: bool) -> ChunkExtras:
        """What the event of a delta has beside its text."""
        self._hear(place, delta)
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
            content = self._shapes.chat(delta.scored)
            return {"content": content, "refusal": None} if content else None
        found = self._completion_logprobs(place, delta.scored, prompt=first)
        return found if found["tokens"] else None

    def _completion_logprobs(
        self, place: int, scored: Sequence[ScoredToken], *, prompt: bool
    ) -> dict[str, list[Any]]:
        top, echoed = self.options.logprobs or 0, self._prompt(place)
        found = self._shapes.completion(scored, len(echoed.text), top)
        if prompt and self.options.echo:
            before = self._shapes.completion_prompt(
                echoed.token_ids, echoed.offsets, echoed.logprobs, top
            )
            found = {name: before[name] + column for name, column in found.items()}
        return found

    # Whole answers

    def complete(self, body: dict[str, Any], places: Sequence[int]) -> None:
        """Add to an answer what it has beside its choices' texts; they are those at ``places``."""
        for choice, place in zip(body["choices"], places, strict=True):
            self._complete_choice(choice, place)
        if self._is_chat:
            self._add_prompt(body, 0)

    def _complete_choice(self, choice: dict[str, Any], place: int) -> None:
        options, kept = self.options, self._kept[place]
        if self._is_chat:
            if options.logprobs is not None:
                content = self._shapes.chat(kept.scored)
                choice["logprobs"] = {"content": content, "refusal": None}
        else:
            choice["text"] = self.echo(place) + choice["text"]
            if options.logprobs is not None:
                choice["logprobs"] = self._completion_logprobs(place, kept.scored, prompt=True)
            self._add_prompt(choice, place)
        if options.token_ids:
            choice["token_ids"] = kept.token_ids

    def _add_prompt(self, where: dict[str, Any], place: int) -> None:
        options, prompt = self.options, self._prompt(place)
        if options.prompt_logprobs is not None:
            where["prompt_logprobs"] = self._shapes.prompt_logprobs(
                prompt.token_ids, prompt.logprobs, options.prompt_logprobs
            )
        if options.token_ids:
            where["prompt_token_ids"] = list(prompt.token_ids)

    @property
    def entries(self) -> int:
        """How many log probabilities a whole answer writes, about."""
        options = self.options
        answer = sum(len(kept.scored) for kept in self._kept) * (1 + (options.logprobs or 0))
        echoes = self.options.best_of * (options.echo and options.logprobs is not None)
        prompt = sum(
            len(prompt.logprobs) * (1 + len(prompt.logprobs[0].top))
            for prompt in self._prompts
            if prompt.logprobs
        )
        return answer + prompt * max(1, echoes)

    def best(self) -> list[int]:
        """The places of the ``n`` likeliest of each prompt's answers, likeliest first.

        The likeliest is that with the highest mean log probability of its tokens.
        """
        count, n = self.options.best_of, self.options.n
        if n == count:
            return list(range(len(self._kept)))
        chosen = []
        for first in range(0, len(self._kept), count):
            places = range(first, first + count)
            chosen += sorted(places, key=lambda place: -_mean(self._kept[place].scored))[:n]
        return chosen


def _mean(scored: Sequence[ScoredToken]) -> float:
    return sum(token.logprobs.logprob for token in scored) / max(1, len(scored))


def echoed_prompt(
    tokenizer: Tokenizer, token_ids: tuple[int, ...], text: str | None
) -> EchoedPrompt:
    """A prompt's text, its special tokens by their names, and where its tokens begin in it.

    ``text`` is what the client wrote: special tokens that were put in front of it are not in it.
    """
    detokenizer = tokenizer.detokenizer(special_tokens=True)
    pieces: list[str] = []
    offsets: list[int] = []
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
