"""A cluster in virtual time around the real admission."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

from baton.config.cluster import Config
from baton.errors import BatonError, Overloaded
from router.admission.capacity import Capacity
from router.admission.controller import AdmissionController, AdmissionRequest

BLOCK = 16
WEIGHTS = {"default": 1.0, "other": 1.0}


@dataclass
class Cluster:
    """Prefill workers that each take a prompt at a time, decode places, and a clock of its own."""

    tokens_per_s: float = 2000.0
    """Of each prefill worker."""
    workers: int = 1
    model_error: float = 1.0
    """The factor by which the cost model predicts prompts to take longer than they do."""
    places: int = 64
    blocks: int = 4000
    token_s: float = 0.01
    limit: int = 1000
    slo_s: float = math.inf
    """Finite: ``admission = "slo"``."""
    slo_tpot_s: float = math.inf
    max_queue_s: float = math.inf
    weights: dict[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    strain: float = 0.0
    """By how many milliseconds a token takes longer for each prompt of the last second."""
    now: float = 0.0
    refused: dict[str, BatonError] = field(default_factory=dict)
    offered: dict[str, float] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    tpots: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paces = math.isfinite(self.slo_s) or math.isfinite(self.slo_tpot_s)
        config = Config(
            admission="slo" if paces else "queue",
            max_waiting_requests=self.limit,
            max_queue_s=self.max_queue_s,
            slo_tpot_s=self.slo_tpot_s,
        )
        self.admission = AdmissionController(self.weights, config, self._refuse)
        self.free_at = [0.0] * self.workers
        self.events: list[tuple[float, int, str, str]] = []
        self.count = itertools.count()
        self.wanted: dict[str, AdmissionRequest] = {}
        self.running: dict[str, int] = {}
        self.max_blocks = self.max_running = 0

    def _refuse(self, request_id: str, error: BatonError) -> None:
        self.refused[request_id] = error
        self.admission.left(request_id, self.now)

    def step_s(self) -> float:
        """What snapshots say of a decode step."""
        return 0.0

    def capacity(self) -> Capacity:
        used = sum(self.running.values())
        return Capacity(
            block_size=BLOCK,
            prefill_workers=self.workers,
            decode_sequences=len(self.running),
            max_sequences=self.places,
            available_blocks=self.blocks - used,
            max_available_blocks=self.blocks - used,
            total_blocks=self.blocks,
            max_total_blocks=self.blocks,
            step_s=self.step_s(),
            prefill_cost=(0.0, self.model_error * 1e3 / self.tokens_per_s, 0.0),
        )

    def offer(
        self,
        name: str,
        prompt: int = 100,
        answer: int = 10,
        *,
        tenant: str = "default",
        priority: int = 0,
        deadline_s: float = math.inf,
        background: bool = False,
    ) -> None:
        """Raises Overloaded where it is refused at once; ``refused`` has later refusals."""
        own_deadline = deadline_s < math.inf
        self.wanted[name] = applicant = AdmissionRequest(
            name,
            tenant,
            priority,
            prompt,
            answer,
            math.inf if own_deadline else self.slo_s,
            deadline_s,
            own_deadline=own_deadline,
            background=background,
        )
        self.offered[name] = self.now
        try:
            self.admission.offer(applicant, self.capacity(), self.now)
        except Overloaded as error:
            self._refuse(name, error)
            raise
        finally:
            self.pump()

    def pump(self) -> None:
        for name in self.admission.admit(self.capacity(), self.now):
            self.order.append(name)
            worker = self.free_at.index(min(self.free_at))
            began = max(self.free_at[worker], self.now)
            self.free_at[worker] = began + self.wanted[name].prompt_tokens / self.tokens_per_s
            self.at(self.free_at[worker], "first", name)

    def at(self, when: float, what: str, name: str) -> None:
        heapq.heappush(self.events, (when, next(self.count), what, name))

    def until(self, when: float, step_s: float = math.inf) -> None:
        """Let the time pass; every ``step_s`` admission is asked, as the admission queue does."""
        while (moment := min(when, self.now + step_s)) > self.now:
            self._until(moment)
            if step_s < math.inf:
                self.pump()
        self._until(when)

    def _until(self, when: float) -> None:
        while self.events and self.events[0][0] <= when:
            self.now, _, what, name = heapq.heappop(self.events)
            wanted = self.wanted[name]
            if what == "first":
                self.begun[name] = self.now
                total = -(-(wanted.prompt_tokens + wanted.max_tokens) // BLOCK)
                self.running[name] = total
                self.max_running = max(self.max_running, len(self.running))
                self.max_blocks = max(self.max_blocks, sum(self.running.values()))
                self.admission.first_token(name, self.now)
                self.admission.generated(name, wanted.max_tokens)
                token_s = self.token_s
                if self.strain:
                    recent = sum(at > self.now - 1.0 for at in self.begun.values())
                    token_s += self.strain * recent / 1e3
                self.tpots[name] = token_s
                self.at(self.now + token_s * wanted.max_tokens, "end", name)
            else:
                del self.running[name]
                self.admission.left(name, self.now, finished=True)
            self.pump()
        self.now = max(self.now, when)

    def finish(self) -> None:
        while self.events:
            self.until(self.events[0][0])

    def stand_still(self, seconds: float) -> None:
        """The prefill workers compute nothing for some seconds; what lies there ends later."""
        self.events = [
            (when + seconds, number, what, name) for when, number, what, name in self.events
        ]
        self.free_at = [at + seconds for at in self.free_at]

    def flood(self, requests: int, prompt: int = 100, pause_s: float = 0.0) -> Overloaded:
        """Offer up to a number of requests, at once or with pauses. Returns the first refusal."""
        for number in range(requests):
            try:
                self.offer(f"r{number}", prompt)
            except Overloaded as error:
                return error
            self.until(self.now + pause_s)
        raise AssertionError("no request was refused")

    def learn(self) -> None:
        """A second of load, so that the rates are known."""
        for number in range(20 + int(self.workers * self.tokens_per_s / 100)):
            self.offer(f"learned-{number}")
        self.finish()
        assert self.admission.speed is not None
        self.now += 1.0
