"""A request that was admitted, and its attempts: shared by dispatcher, ``Attempts`` and ``Moves``.

Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from opentelemetry.trace import INVALID_SPAN, Span

from baton.errors import DeadlineExceeded
from baton.hashing import HashChain
from baton.request import LOWEST_PRIORITY, SequenceSpec
from router.core.request import GenerationRequest
from router.dispatch.poison import FailedWorkers
from router.dispatch.request_life import RequestLife
from router.routing.ledger import Promise
from router.routing.route_finder import Stage
from router.workers.worker_links import WorkerLink


@dataclass(eq=False, slots=True)
class RunningRequest:
    """From its admission to its end."""

    request: GenerationRequest
    life: RequestLife
    deadline: float
    """On the monotonic clock."""
    attempts: set[Attempt] = field(default_factory=set)
    """Those that are placed."""
    next_attempt: int = 0
    excluded: set[str] = field(default_factory=set)
    """Workers that have failed under it."""
    failed_workers: FailedWorkers = field(default_factory=FailedWorkers)
    failures: int = 0
    """How often it was to be moved because something failed."""
    chains: defaultdict[int, HashChain] = field(default_factory=lambda: defaultdict(HashChain))
    """The hashes of each choice that was placed."""
    cache_told: bool = False
    """Whether it is known how much of the prompt was found in a cache."""
    moves: set[asyncio.Task[None]] = field(default_factory=set)
    """Choices that are being placed again."""

    def groups(self, choices: Iterable[int]) -> list[tuple[int, ...]]:
        """Which of them are placed together: all that lie side by side and have no token yet, so

        that their prompt is computed once; else each is a sequence of its own.
        """
        numbers = sorted(choices)
        together = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        if together and not any(self.life.choices[n].token_ids for n in numbers):
            return [tuple(numbers)]
        return [(number,) for number in numbers]

    def stage(self, group: tuple[int, ...], now: float, *, scored: bool, holder: str = "") -> Stage:
        """What of a group is to be placed. ``scored``: it finds what is to be told of the prompt.

        ``holder`` has all of its blocks. Raises DeadlineExceeded.
        """
        return Stage(
            self.request,
            self._token_ids(group),
            len(group),
            self._left_s(now),
            # An embedding is the last token's, which is computed in any case.
            scored and self.request.scores_prompt,
            self.chains[group[0]],
            is_moved=self.next_attempt > 0,
            holder=holder,
        )

    def spec(
        self, group: tuple[int, ...], router_id: str, context_class: str, *, scored: bool
    ) -> SequenceSpec:
        """The same for the workers, as the request's next attempt. Raises DeadlineExceeded."""
        request, sampling = self.request, self.request.sampling
        left_s = self._left_s(time.monotonic())
        number, self.next_attempt = self.next_attempt, self.next_attempt + 1
        return SequenceSpec(
            request_id=request.request_id,
            attempt=number,
            router_id=router_id,
            token_ids=self._token_ids(group),
            prompt_length=len(request.prompt_ids),
            sampling=sampling if scored else replace(sampling, prompt_logprobs=None),
            cache_salt=request.cache_salt,
            context_class=context_class,
            principal=request.principal,
            deadline_s=left_s,
            choices=len(group),
            choice=group[0],
            priority=LOWEST_PRIORITY if request.background else request.priority,
            preemptions=max(self.life.choices[n].preemptions for n in group),
            hand_back=True,
            embeds=request.embeds,
        )

    def _left_s(self, now: float) -> float:
        left_s = self.deadline - now
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited")
        return left_s

    def _token_ids(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return self.request.prompt_ids + tuple(self.life.choices[group[0]].token_ids)


@dataclass(eq=False, slots=True)
class Attempt:
    """Some choices of a request at two workers, one and the same where the prompt is computed

    locally.
    """

    owner: RunningRequest
    spec: SequenceSpec
    source: WorkerLink
    target: WorkerLink
    promise: Promise
    choices: set[int]
    """Numbers of those that have not been handed back."""
    decode_began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the decode worker has told a token: the handoff was committed."""
    prefill: asyncio.Task[None] | None = None
    is_computed: bool = False
    """Its first token has come of the source: the decode worker has a ticket for it."""
    begun_at: float = field(default_factory=time.monotonic)
    heard_before: int = 0
    """How many messages had come on the source's stream of prefills when it was begun."""
    failed: bool = False
    """Its worker has said that it has failed: nothing is left to abort."""
    span: Span = INVALID_SPAN
    """From its placing to its end."""

    @property
    def computes(self) -> bool:
        """Whether something is still to come of its source."""
        wanted = not self.decode_began.is_set() or self.owner.life.awaits_prompt
        return wanted and self.prefill is not None and not self.prefill.done()

    def touches(self, link: WorkerLink) -> bool:
        """Whether a worker has had the sequence: one that waits to be handed over was not there,

        nor one at a source that has died before it could say anything.
        """
        has_begun = self.source.prefills.messages > self.heard_before
        return (link is self.source and has_begun) or self.decode_began.is_set()

    @property
    def unfinished(self) -> set[int]:
        """Choices of which more tokens are wanted."""
        return {n for n in self.choices if not self.owner.life.choices[n].ended}

    @property
    def is_whole(self) -> bool:
        """Whether its decode worker has brought all that was wanted of it."""
        whole = not self.failed and bool(self.choices) and not self.unfinished
        return whole and self.touches(self.target)

    @property
    def runs_at_worker(self) -> bool:
        """Whether its decode worker may have something of it to end."""
        choices = self.owner.life.choices
        return not self.failed and any(not choices[n].worker_finished for n in self.choices)
