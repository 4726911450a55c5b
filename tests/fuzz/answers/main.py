"""Rounds: each has a seed, from which its cluster, its requests and its faults follow.

``python -m tests.fuzz answers --minutes 5 --seed 7``
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path

from baton.errors import BatonError, DeadlineExceeded, DeadlineUnreachable, Unavailable
from baton.sampling_params import SamplingParams
from router.core.request import GenerationRequest
from router.dispatch.dispatcher import ClusterDispatcher
from tests.fuzz.answers.cluster import FuzzedCluster, fuzzed_cluster, make_models, references
from tests.fuzz.answers.comparison import (
    Answer,
    Malformed,
    Reference,
    difference,
    is_beginning,
)
from tests.fuzz.answers.faults import KINDS, strike_on
from tests.fuzz.answers.requests import DEADLINE_S, make_request, sent_now
from tests.support.mini_cluster import valkey

ROUND_S = 60.0
REQUESTS = 80
"""Different requests of a round. Each comes several times, so that caches have its blocks."""
CLIENTS = 10
_CANCELS = 0.25
"""Share of the requests whose client leaves."""
_QUIET_S = 1.5
"""Seconds at a round's end in which no fault begins."""
_MOST = 0.8
"""Share of a client's own deadline after which an error may say what the request waited for."""
_EXCUSED_S = 5.0
"""Seconds after the loss of a model's last worker in which its requests may fail."""
_SPARE = 2
"""Number of lost workers within this time from which on requests may fail."""
_SHOWN_S = 3.0
"""Seconds before a wrong answer whose events are shown with it."""


@dataclass(slots=True)
class Found:
    """What rounds have come to."""

    seconds: float = 0.0
    compared: int = 0
    """Whole answers, each equal to the reference or in ``faults``."""
    begun: int = 0
    """Answers whose clients left, or that ended with an error: their tokens are compared."""
    errors: Counter[str] = field(default_factory=Counter)
    """By code, where the client set no deadline."""
    strikes: int = 0
    by_model: Counter[str] = field(default_factory=Counter)
    """Answers by the fingerprint that they name."""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        errors = ", ".join(f"{count} {code}" for code, count in self.errors.items()) or "none"
        return (
            f"{self.seconds / 60:.1f} minutes, {self.compared} whole answers and {self.begun} begun"
            f" ones compared, {self.strikes} faults struck, errors: {errors},"
            f" by model {sorted(self.by_model.values())}, found: {len(self.faults)}"
        )


@dataclass(slots=True)
class _Round:
    """One cluster under load. ``asked`` has what came of every request."""

    seed: int
    cluster: FuzzedCluster
    seconds: float
    asked: list[tuple[GenerationRequest, Answer, str]] = field(default_factory=list)
    """Requests, their answers, and what was wrong with the stream of deltas."""

    async def run(self, kinds: Sequence[str]) -> int:
        """Run clients and faults. Return how many faults there were."""
        source = random.Random(f"faults {self.seed}")
        quiet_at = self.seconds - _QUIET_S
        faults = strike_on(self.cluster, source, tuple(kinds), quiet_at)
        clients = [self._ask_on(number) for number in range(CLIENTS)]
        struck, _ = await asyncio.gather(faults, asyncio.gather(*clients))
        return struck

    async def _ask_on(self, number: int) -> None:
        source = random.Random(f"client {self.seed} {number}")
        while self.cluster.now < self.seconds:
            request = make_request(self.seed, source.randrange(REQUESTS))
            router = source.choice(self.cluster.routers)
            leaves_after_s = leaves_after = None
            if source.random() < _CANCELS:
                if source.random() < 0.5:
                    leaves_after = source.choice((1, 2, 3))
                else:
                    leaves_after_s = source.random() * 0.8
            answer = Answer.empty(request)
            answer.began = self.cluster.now
            broken = await self._ask(router, request, answer, leaves_after, leaves_after_s)
            answer.ended = self.cluster.now
            self.asked.append((request, answer, broken))
            if answer.error is not None:
                await asyncio.sleep(_REST_S)

    async def _ask(
        self,
        router: ClusterDispatcher,
        request: GenerationRequest,
        answer: Answer,
        leaves_after: int | None,
        leaves_after_s: float | None,
    ) -> str:
        """Read an answer into ``answer``. Return what no client may see, "" as a rule."""
        try:
            async with (
                asyncio.timeout(leaves_after_s or DEADLINE_S + 10),
                aclosing(router.generate(sent_now(request))) as deltas,
            ):
                await answer.read(deltas, leaves_after)
        except TimeoutError:
            return "" if leaves_after_s else "the answer neither ends nor fails"
        except Malformed as error:
            return str(error)
        except BatonError as error:
            answer.error = error
        except Exception as error:
            logging.getLogger(__name__).exception("a request raised")
            return f"{type(error).__name__} is no error of Baton's: {error}"
        return ""


_REST_S = 0.05
"""Pause of a client after an error, in seconds."""


class _Judge:
    """Compares answers with references, by fingerprint."""

    def __init__(self, known: dict[str, Reference], cluster: FuzzedCluster, found: Found) -> None:
        self._known = known
        self._cluster = cluster
        self._found = found

    def judge(self, request: GenerationRequest, answer: Answer, broken: str) -> str:
        """Say what is wrong with an answer; "" where it is right."""
        found = self._found
        if broken:
            return broken
        if answer.is_whole:
            return self._judge_whole(request, answer)
        found.begun += 1
        named = {one.fingerprint for one in answer.choices} - {""}
        for name, reference in self._known.items():
            if named - {name}:
                continue
            expected = reference.answer(request)
            if is_beginning(answer, expected):
                break
        else:
            tokens = [one.token_ids for one in answer.choices]
            return (
                f"{answer.error or 'the client left'}: no answer of {named or 'any model'} begins"
                f" with {tokens}"
            )
        if answer.error is None or type(answer.error) is type(expected.error):
            return ""
        return self._judge_error(request, answer, answer.error)

    def _judge_whole(self, request: GenerationRequest, answer: Answer) -> str:
        self._found.compared += 1
        names = {one.fingerprint for one in answer.choices}
        if len(names) > 1:
            return f"the choices are of several fingerprints: {sorted(names)}"
        (name,) = names
        if name not in self._known:
            return f"no model of the round has the fingerprint {name!r}"
        self._found.by_model[name] += 1
        return difference(request, answer, self._known[name].answer(request))

    def _judge_error(self, request: GenerationRequest, answer: Answer, error: BatonError) -> str:
        if request.own_deadline and isinstance(error, DeadlineExceeded | DeadlineUnreachable):
            return ""
        self._found.errors[error.code or type(error).__name__] += 1
        waited = answer.ended - answer.began >= _MOST * request.deadline_s
        if request.own_deadline and waited and isinstance(error, Unavailable):
            return ""

        def count(times: Sequence[float]) -> int:
            return sum(answer.began - _EXCUSED_S <= at <= answer.ended for at in times)

        # The few workers of a model may all be lost at the same time.
        excused = count(self._cluster.excuses) or count(self._cluster.losses) >= _SPARE
        if excused and isinstance(error, Unavailable):
            return ""
        return f"{type(error).__name__}: {error}"


class _Errors(logging.Handler):
    """Keeps what is logged as an error: nothing that is done to a cluster here is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def run_round(
    seed: int,
    seconds: float,
    models: dict[str, Path],
    known: dict[str, Reference],
    redis_url: str,
    found: Found,
    kinds: Sequence[str] = tuple(KINDS),
) -> None:
    """Run one round, and add what it came to to ``found``."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    began = time.monotonic()
    try:
        async with fuzzed_cluster(seed, models, redis_url) as cluster:
            one = _Round(seed, cluster, seconds)
            found.strikes += await one.run(kinds)
            left = await cluster.left_over()
    finally:
        logging.getLogger().removeHandler(errors)
    for reference in known.values():
        reference.forget()
    judge = _Judge(known, cluster, found)
    told = []
    for request, answer, broken in one.asked:
        wrong = judge.judge(request, answer, broken)
        if wrong:
            told.append(_report(cluster, request, answer, wrong))
    told += [f"left over: {line}" for line in left]
    told += [f"logged: {line}" for line in errors.lines]
    replay = f"python -m tests.fuzz answers --seed {seed} --minutes {seconds / 60:g}"
    if set(kinds) != set(KINDS):
        replay += "".join(f' --only "{kind}"' for kind in kinds)
    found.faults += [f"seed {seed}: {line}\n  again: {replay}" for line in told]
    found.seconds += time.monotonic() - began


def _report(cluster: FuzzedCluster, request: GenerationRequest, answer: Answer, wrong: str) -> str:
    since, until = answer.began - _SHOWN_S, answer.ended
    events = [f"    {at:6.2f} s {event}" for at, event in cluster.events if since <= at <= until]
    head = f"request {request.request_id}, {answer.began:.2f} to {answer.ended:.2f} s: {wrong}"
    shape = cluster.events[0][1]
    asked = ", ".join(f"{name}={value!r}" for name, value in _changed(request).items())
    return "\n".join([head, f"  {asked}", f"  cluster {shape}", "  events:", *events])


def _changed(given: GenerationRequest | SamplingParams) -> dict[str, object]:
    """Return the fields that are not as usual; of a prompt its length."""
    changed: dict[str, object] = {}
    for one in fields(given):
        value = getattr(given, one.name)
        if isinstance(value, SamplingParams):
            changed |= _changed(value)
        elif one.name == "prompt_ids":
            changed["prompt"] = f"{len(value)} tokens"
        elif value != one.default and one.name not in ("request_id", "timeline", "principal"):
            changed[one.name] = value
    return changed


def fuzz(minutes: float, seed: int, folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> Found:
    """Run rounds of at most ``ROUND_S`` with the seeds from ``seed`` on. Raises BatonError."""
    return asyncio.run(_fuzz(minutes * 60, seed, folder, kinds))


async def _fuzz(seconds: float, seed: int, folder: Path, kinds: Sequence[str]) -> Found:
    found = Found()
    models = make_models(folder)
    known = references(models)
    rounds = max(1, round(seconds / ROUND_S))
    for number in range(rounds):
        with valkey() as url:
            await run_round(seed + number, seconds / rounds, models, known, url, found, kinds)
    return found
