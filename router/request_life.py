"""One request between the workers and its client.

    placed ─first token→ streaming ─finish reason, stop string→ finished
    placed, streaming ─failure→ failed

Tokens of other attempts are dropped, duplicates skipped, early ones kept until their turn comes.
What the client has not read yet gathers in one delta: at most a whole answer.
"""

from __future__ import annotations

import asyncio
import math

from baton.errors import BatonError
from baton.grpc_errors import error_from_code
from baton.request import FinishReason, TokenOutput
from router.generation import OutputDelta
from router.output_assembler import OutputAssembler


class RequestLife:
    """Owned by the event loop."""

    def __init__(self, request_id: str, attempt: int, assembler: OutputAssembler) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.token_ids: list[int] = []
        """Every token accepted from a worker, those beyond a stop included."""
        self.decode_began = asyncio.Event()
        """Set once the decode worker has told a token: the handoff was committed."""
        self.worker_finished = False
        """The worker itself ended the sequence; nothing is left to abort."""
        self._assembler = assembler
        self._early: dict[int, TokenOutput] = {}
        self._delta: OutputDelta | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def stopped(self) -> bool:
        """A stop string was found: the worker's sequence is to be ended."""
        return self._assembler.stopped

    def accept(self, output: TokenOutput, *, cached_prompt_tokens: int = 0) -> None:
        """Take in what a worker says of this request."""
        if output.attempt != self.attempt:
            return
        if output.error:
            self.worker_finished = True
            self.fail(error_from_code(output.error_code or "worker_failed", output.error))
            return
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
        new = output.token_ids[len(self.token_ids) - output.index :]
        if new or cached_prompt_tokens or output.finish_reason is not None:
            self.token_ids.extend(new)
            self._push(new, output.finish_reason, cached_prompt_tokens)
        if output.finish_reason is not None:
            self.worker_finished = True

    def _push(self, token_ids: tuple[int, ...], finish: FinishReason | None, cached: int) -> None:
        delta = self._assembler.push(token_ids, finish, cached)
        if delta is not None:
            self._delta = delta if self._delta is None else _joined(self._delta, delta)
            self._changed.set()

    def fail(self, error: BatonError) -> None:
        """End the request with an error, unless it has ended."""
        if self._error is None and not self._assembler.finished:
            self._error = error
            self._changed.set()

    async def next_delta(self) -> OutputDelta:
        """What has gathered since the last call; waits for something. Raises BatonError."""
        await self._changed.wait()
        self._changed.clear()
        delta, self._delta = self._delta, None
        if delta is None:
            assert self._error is not None, "woken for nothing"
            raise self._error
        if self._error is not None:
            self._changed.set()
        return delta


def _joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    return OutputDelta(
        first.text + second.text,
        first.token_ids + second.token_ids,
        second.finish_reason,
        first.cached_prompt_tokens + second.cached_prompt_tokens,
    )
