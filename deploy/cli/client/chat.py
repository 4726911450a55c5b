"""A conversation with the model over gRPC: its messages, and the figures of each answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.client import Client
from baton.errors import ContextLengthExceeded
from baton.v1.inference_pb2 import FINISH_REASON_LENGTH, ChatMessage
from baton.v1.sampling_pb2 import SamplingParameters

_BURST_S = 0.02
"""Time in seconds. If all tokens arrive within it, no rate is shown: the tokens were read
together."""

Write = Callable[[str], None]
"""A function that shows a piece of an answer's text immediately."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer with its figures."""

    text: str
    tokens: int = 0
    """Number of tokens of the answer."""
    first_s: float | None = None
    """Seconds until the first token; None if the answer has no tokens."""
    tokens_per_s: float | None = None
    """Tokens per second after the first message of the answer; None if the rate is unknown."""
    is_cut: bool = False
    """Whether the answer ended because it reached the maximum number of tokens."""
    interrupted: bool = False
    """Whether Ctrl-C ended the answer."""
    prefill_worker: str = ""
    decode_worker: str = ""
    """Name of the decode worker; empty if the cluster does not show it to this client."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens, which are included in ``tokens``. Their text is not shown."""
    forgotten: int = 0
    """Number of old questions that were removed from the conversation because the context was
    full."""

    @property
    def figures(self) -> str:
        """Return one line of figures for the user."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.reasoning_tokens:
            parts.append(f"{self.reasoning_tokens} of reasoning")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"first token after {_duration(self.first_s)}")
        if self.interrupted:
            parts.append("interrupted")
        elif self.is_cut:
            parts.append("cut at the maximum length (--max-tokens)")
        workers = dict.fromkeys(filter(None, (self.prefill_worker, self.decode_worker)))
        if workers:
            parts.append(" → ".join(workers))
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class _Turn:
    question: str
    answer: str


class Chat:
    """Keeps the messages of a conversation. Each request contains all of them."""

    def __init__(
        self,
        client: Client,
        sampling: SamplingParameters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.system = ""
        """The system prompt. If it is empty, requests have none."""
        self._client = client
        self._sampling = sampling
        self._clock = clock
        self._turns: list[_Turn] = []
        self._failed = ""
        """The last question, if it failed to get an answer; otherwise empty."""

    def ask(self, question: str, write: Write) -> ChatReply:
        """Stream the answer to a question through ``write``. Raises BatonError.

        The received part of an interrupted answer stays in the conversation. A question that fails
        is removed from it, and ``take_back`` returns that question. When the context is full, the
        oldest questions and their answers are removed.
        """
        self._failed = question
        kept = self._turns
        while True:
            try:
                answer = self._stream(kept, question, write)
            except ContextLengthExceeded:
                if not kept:
                    raise
                kept = kept[max(1, len(kept) // 4) :]
            else:
                break
        forgotten = len(self._turns) - len(kept)
        self._turns = [*kept, _Turn(question, answer.text)]
        self._failed = ""
        return replace(answer, forgotten=forgotten)

    def take_back(self) -> str:
        """Remove the last question with its answer from the conversation, and return the question;
        empty if there is none."""
        if not self._failed and self._turns:
            self._failed = self._turns.pop().question
        return self._failed

    def clear(self) -> None:
        """Begin a new conversation, with the same system prompt."""
        self._turns = []
        self._failed = ""

    def _stream(self, turns: Sequence[_Turn], question: str, write: Write) -> ChatReply:
        messages = self._messages(turns, question)
        pieces: list[str] = []
        begun = first = last = self._clock()
        tokens = first_tokens = 0
        answer = ChatReply("", interrupted=True)
        try:
            for message in self._client.generate(messages=messages, sampling=self._sampling):
                last = self._clock()
                if message.token_ids and not tokens:
                    first, first_tokens = last, len(message.token_ids)
                tokens += len(message.token_ids)
                if message.text:
                    pieces.append(message.text)
                    write(message.text)
                if message.HasField("usage"):
                    answer = ChatReply(
                        "",
                        is_cut=message.finish_reason == FINISH_REASON_LENGTH,
                        prefill_worker=message.prefill_worker,
                        decode_worker=message.decode_worker,
                        reasoning_tokens=message.usage.reasoning_tokens,
                    )
        except KeyboardInterrupt:
            pass
        rest = tokens - first_tokens
        return replace(
            answer,
            text="".join(pieces),
            tokens=tokens,
            first_s=first - begun if tokens else None,
            tokens_per_s=rest / (last - first) if rest and last - first >= _BURST_S else None,
        )

    def _messages(self, turns: Sequence[_Turn], question: str) -> list[ChatMessage]:
        messages = [ChatMessage(role="system", content=self.system)] if self.system else []
        for turn in turns:
            messages.append(ChatMessage(role="user", content=turn.question))
            messages.append(ChatMessage(role="assistant", content=turn.answer))
        messages.append(ChatMessage(role="user", content=question))
        return messages


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
