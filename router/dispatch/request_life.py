"""One request between the workers and its client.

    placed ─first token→ streaming ─finish reason, stop string→ finished
    placed, streaming ─moved→ placed, with the tokens that it has
    placed, streaming ─failure→ failed

Tokens of other attempts are dropped, duplicates skipped, early ones kept until their turn comes.
Each choice has its own attempt: they are placed together, and move one by one.
What the client has not read yet gathers in one delta: at most a whole answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from baton.errors import BatonError
from baton.logprobs import TokenLogprobs
from baton.request import TokenOutput
from baton.rpc.grpc_errors import error_from_code
from router.core.request import OutputDelta
from router.text.output_processor import OutputProcessor

_PART = 64


class RequestLife:
    """Owned by the event loop."""

    def __init__(
        self,
        request_id: str,
        attempt: int,
        *assemblers: OutputProcessor,
        awaits_prompt: bool = False,
    ) -> None:
        """An assembler for each choice. ``awaits_prompt``: nothing is given before the prompt's log

        probabilities are there, or its embedding.
        """
        self.request_id = request_id
        self.awaits_prompt = awaits_prompt
        self._choices = [
            ChoiceLife(n, assembler, attempt) for n, assembler in enumerate(assemblers)
        ]
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._embedding: tuple[float, ...] = ()
        self._error: BatonError | None = None
        self._failed = False
        self._changed = asyncio.Event()

    @property
    def token_ids(self) -> list[int]:
        """Every token of the first choice accepted from a worker, those beyond a stop included."""
        return self._choices[0].token_ids

    @property
    def choices(self) -> Sequence[ChoiceLife]:
        """All of them, by number."""
        return self._choices

    @property
    def worker_finished(self) -> bool:
        """The worker itself ended every sequence; nothing is left to abort."""
        return self._failed or all(choice.worker_finished for choice in self._choices)

    @property
    def several(self) -> bool:
        """Whether there is more than one choice."""
        return len(self._choices) > 1

    @property
    def stopped(self) -> bool:
        """A stop string was found: the worker's sequence is to be ended."""
        return any(choice.assembler.stopped for choice in self._choices)

    @property
    def finished(self) -> bool:
        """Every choice's last delta was given."""
        return all(choice.is_over for choice in self._choices)

    def accept(self, output: TokenOutput, *, cached_prompt_tokens: int = 0) -> None:
        """Take in what a worker says of this request."""
        if output.choice >= len(self._choices):
            return
        choice = self._choices[output.choice]
        if output.attempt != choice.attempt:
            return
        if output.error:
            self._failed = True
            self.fail(error_from_code(output.error_code or "worker_failed", output.error))
            return
        if self.awaits_prompt and (output.prompt_logprobs or output.embedding):
            self.awaits_prompt = False
            self._prompt_logprobs = output.prompt_logprobs
            self._embedding = output.embedding
        choice.accept(output, cached_prompt_tokens)
        if choice.unread and not self.awaits_prompt:
            self._changed.set()

    def take_stopped(self) -> list[int]:
        """Choices that a stop string has ended while the worker runs them: each is given once."""
        return [choice.number for choice in self._choices if choice.take_stopped()]

    def fail(self, error: BatonError) -> None:
        """End the request with an error, unless all of its answer is there."""
        is_there = all(choice.assembler.finished for choice in self._choices)
        if self._error is None and (self.awaits_prompt or not is_there):
            self._error = error
            self._changed.set()

    def _waiting(self) -> ChoiceLife | None:
        """The first choice that has something to tell."""
        for choice in self._choices:
            if choice.unread:
                return choice
        return None

    async def next_delta(self) -> OutputDelta:
        """What has gathered of a choice since it was last asked; waits for something.

        Raises BatonError.
        """
        await self._changed.wait()
        choice = None if self.awaits_prompt else self._waiting()
        if choice is None:
            assert self._error is not None, "woken for nothing"
            raise self._error
        delta = choice.take()
        if self._prompt_logprobs:
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = ()
        if self._embedding:
            delta = replace(delta, embedding=self._embedding)
            self._embedding = ()
        if self._error is None and not (self.several and self._waiting()):
            self._changed.clear()
        return delta


class ChoiceLife:
    """One answer of a request."""

    def __init__(self, number: int, assembler: OutputProcessor, attempt: int = 0) -> None:
        self.number = number
        self.assembler = assembler
        self.attempt = attempt
        self.prefill_worker = self.decode_worker = ""
        """The names of the workers that it was placed at last."""
        self.preemptions = 0
        """How often a worker has handed it back."""
        self.token_ids: list[int] = []
        self.unread: list[OutputDelta] = []
        """What the client has not read. It is joined when it is read, and before that in parts of

        ``_PART`` pieces, which take less memory.
        """
        self._loose = 0
        """How many pieces are not in such a part."""
        self.worker_finished = False
        self.is_over = False
        self._early: dict[int, TokenOutput] = {}
        self._stop_taken = False

    @property
    def ended(self) -> bool:
        """Whether no more tokens are wanted of it."""
        return self.worker_finished or self.assembler.finished

    def place(self, attempt: int, prefill_worker: str, decode_worker: str) -> None:
        """It begins, or goes on elsewhere behind the tokens that were accepted."""
        self.attempt = attempt
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self._early.clear()

    def accept(self, output: TokenOutput, cached_prompt_tokens: int) -> None:
        """Take in what a worker says of it."""
        if output.index > len(self.token_ids):
            self._keep(output)
            return
        self._take(output, cached_prompt_tokens)
        while (index := min(self._early, default=math.inf)) <= len(self.token_ids):
            self._take(self._early.pop(int(index)))

    def _keep(self, early: TokenOutput) -> None:
        kept = self._early.get(early.index)
        if kept is None or len(kept.token_ids) <= len(early.token_ids):
            self._early[early.index] = early

    def _take(self, output: TokenOutput, cached_prompt_tokens: int = 0) -> None:
        known = len(self.token_ids) - output.index
        new = output.token_ids[known:]
        if new or cached_prompt_tokens or output.finish_reason is not None:
            self.token_ids.extend(new)
            delta = self.assembler.push(
                new, output.finish_reason, cached_prompt_tokens, output.logprobs[known:]
            )
            if delta is not None:
                if delta.finish_reason is not None:
                    delta = replace(
                        delta, prefill_worker=self.prefill_worker, decode_worker=self.decode_worker
                    )
                self._keep_unread(delta)
        if output.finish_reason is not None:
            self.worker_finished = True

    def _keep_unread(self, delta: OutputDelta) -> None:
        self.unread.append(delta)
        self._loose += 1
        if self._loose == _PART:
            self.unread[-_PART:] = [_joined(self.unread[-_PART:])]
            self._loose = 0

    def take(self) -> OutputDelta:
        """What has gathered."""
        pieces, self.unread, self._loose = self.unread, [], 0
        assert pieces, "there is nothing"
        delta = pieces[0] if len(pieces) == 1 else _joined(pieces)
        self.is_over = delta.finish_reason is not None
        return replace(delta, choice=self.number) if self.number else delta

    def take_stopped(self) -> bool:
        """Whether its sequence is to be ended at the worker; once."""
        wanted = self.assembler.stopped and not (self.worker_finished or self._stop_taken)
        self._stop_taken = self._stop_taken or wanted
        return wanted


def _joined(pieces: Sequence[OutputDelta]) -> OutputDelta:
    last = pieces[-1]
    return OutputDelta(
        "".join(piece.text for piece in pieces),
        tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        last.finish_reason,
        sum(piece.cached_prompt_tokens for piece in pieces),
        scored=tuple(chain.from_iterable(piece.scored for piece in pieces)),
        stop_string=last.stop_string,
        prefill_worker=last.prefill_worker,
        decode_worker=last.decode_worker,
    )
