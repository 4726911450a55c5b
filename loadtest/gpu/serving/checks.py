"""Checks of the serving phase's cluster, one function per item.

The expected answers are those that the decode worker gives alone. Answers must equal them token for
token: the workers are deterministic, so neither the batch nor a handoff may change a bit.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import DeadlineExceeded, Unavailable
from loadtest.common.json_worker import Fields
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.gpu.common.results import Check, Fact, Result, Timing
from loadtest.gpu.serving.cluster import Asked, ServedTokens, ServingCluster
from loadtest.router.stream_client import HttpTarget, StreamResult

GONE_S = 2.0
"""Maximum time until a worker with a broken CUDA context ends, in seconds."""
MIB = 1 << 20
_KEPT_MIB = 64
"""Tolerance in MiB of the check that a killed worker's memory is free again. Other processes may
allocate memory in the meantime."""
_RELEASE_S = 20.0
_ANSWER_S = 60.0
_GIVE_UP_S = 15.0
_POLL_S = 0.005
_TOKENS = 256
"""Number of token ids from which prompts are drawn. The served model has these ids at every
size."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and numbers of the requests that the serving checks send."""

    prompts: tuple[int, ...]
    """Lengths of the prompts whose answers are compared. Each prompt is sent greedily and
    sampled."""
    answer_tokens: int
    load_prompt: int
    load_tokens: int
    concurrency: tuple[int, ...]
    rounds: int
    """Number of requests that each client of the load test sends, one after another."""
    killed_prompt: int
    killed_requests: int
    long_answer: int
    """Length in tokens of an answer that takes a second or more."""


SMALL = Sizes(
    prompts=(20, 100, 300),
    answer_tokens=12,
    load_prompt=64,
    load_tokens=16,
    concurrency=(1, 2),
    rounds=3,
    killed_prompt=1500,
    killed_requests=12,
    long_answer=3000,
)
LARGE = Sizes(
    prompts=(100, 1000, 6000),
    answer_tokens=64,
    load_prompt=512,
    load_tokens=128,
    concurrency=(1, 8, 64),
    rounds=4,
    killed_prompt=6000,
    killed_requests=24,
    long_answer=7000,
)


async def check_answers(cluster: ServingCluster, sizes: Sizes) -> list[Result]:
    """Check that greedy and sampled answers after a handoff equal those without a handoff."""
    dice = random.Random(1)  # noqa: S311 - prompts, no secret
    asked = [
        Asked(_prompt(dice, length), sizes.answer_tokens, seed)
        for length in sizes.prompts
        for seed in (None, length)
    ]
    before = await cluster.look("decode-0")
    expected = await cluster.expected(asked)
    alone = await cluster.look("decode-0")
    found = await cluster.answers("handoff", asked)
    after = await cluster.look("decode-0")
    handoffs = {
        name: count - before["received_handoffs"].get(name, 0)
        for name, count in after["received_handoffs"].items()
    }
    wanted = _wanted_transport(after)
    return [
        Check("answers that differ after a handoff", _differing(found, expected), 0),
        Check("answers that were not handed off", len(asked) - _handoffs(alone, after), 0),
        Check("expected answers that were handed off", _handoffs(before, alone), 0),
        Check(f"handoffs by another transport than {wanted}", _others(handoffs, wanted), 0),
        Fact(
            "handoffs",
            {
                "transports": handoffs,
                "bytes": sum(after["received_bytes"].values())
                - sum(before["received_bytes"].values()),
                **_errors(found),
            },
        ),
    ]


async def check_load(cluster: ServingCluster, sizes: Sizes) -> list[Result]:
    """Run a closed loop of streaming clients, and measure latency at each concurrency."""
    dice = random.Random(2)  # noqa: S311 - prompts, no secret
    target = HttpTarget(cluster.address("handoff"), SERVED_NAME)
    before = await cluster.look("decode-0")
    results: list[Result] = []
    try:
        # One-time costs of a cluster's first requests are not measured.
        await _clients(target, sizes, dice, sizes.concurrency[-1], 1)
        for concurrency in sizes.concurrency:
            began = time.perf_counter()
            streamed = await _clients(target, sizes, dice, concurrency, sizes.rounds)
            took_s = time.perf_counter() - began
            results += load_results(streamed, sizes.load_tokens, concurrency, took_s)
    finally:
        await target.close()
    after = await cluster.look("decode-0")
    results.append(Fact("load", {"handoffs": _handoffs(before, after)}))
    return results


async def check_killed_writer(cluster: ServingCluster, sizes: Sizes) -> list[Result]:
    """Kill the prefill worker in the middle of handoffs, start another one, and check the
    answers."""
    dice = random.Random(3)  # noqa: S311 - prompts, no secret
    asked = [
        Asked(_prompt(dice, sizes.killed_prompt), sizes.answer_tokens)
        for _ in range(sizes.killed_requests)
    ]
    expected = await cluster.expected(asked)
    writer, idle = await cluster.look("prefill-0"), await cluster.look("decode-0")
    asking = asyncio.create_task(cluster.answers("handoff", asked))
    try:
        busy = await _until(cluster, lambda now: _handoffs(idle, now) > 0, _ANSWER_S)
        if busy is None:
            raise Unavailable(f"nothing was handed off for {_ANSWER_S:.0f} s")
        cluster.workers["prefill-0"].signal(signal.SIGKILL)
        killed_at = time.perf_counter()
        await cluster.workers["prefill-0"].ended(_GIVE_UP_S)
        found = await asking
    finally:
        asking.cancel()
    handed_off = _handoffs(idle, await cluster.look("decode-0"))
    released = await _until(cluster, lambda now: now["held_blocks"] == 0, _RELEASE_S)
    held = (released or await cluster.look("decode-0"))["held_blocks"]
    lost = [answer for answer in found if answer.error]
    results: list[Result] = [
        Check("requests lost when their writer was killed", len(lost), 0),
        Check("tokens wrong after a killed writer", _differing(found, expected) - len(lost), 0),
        # If all handoffs ended before the kill, the check proves nothing.
        Check("handoffs that ended before the kill", handed_off, len(asked) - 1),
        Check("blocks held for a killed writer", held, idle["held_blocks"]),
        Fact("killed writer", {"requests": len(asked), "handed_off": handed_off, **_errors(found)}),
    ]
    if "free_bytes" in busy:
        results += await _check_memory(cluster, writer["own_bytes"], busy, killed_at)
    results += await _replaced(cluster, "prefill", _prompt(dice, sizes.prompts[0]))
    return results


async def check_poisoned_context(cluster: ServingCluster, sizes: Sizes) -> list[Result]:
    """Break the CUDA context of a decode worker while it answers, start another one, and check the
    answers.
    """
    dice = random.Random(4)  # noqa: S311 - prompts, no secret
    prompt = _prompt(dice, sizes.prompts[0])
    worker = cluster.workers["decode-0"]
    asking = asyncio.create_task(
        cluster.answers("handoff", [Asked(_prompt(dice, sizes.prompts[0]), sizes.long_answer)])
    )
    try:
        if await _until(cluster, lambda now: now["running"] > 0, _ANSWER_S) is None:
            raise Unavailable("the request that is to be in flight does not begin")
        began = time.perf_counter()
        worker.signal(signal.SIGUSR1)
        code, took_s = await _gone(cluster, "decode-0", began)
        (in_flight,) = await asking
    finally:
        asking.cancel()
    return [
        Timing("poisoned worker is gone", took_s, limit_s=GONE_S),
        Check("poisoned workers that live on", int(code is None), 0),
        Fact("poisoned worker", {"exit_code": code, "request_in_flight": in_flight.error or "ok"}),
        *await _replaced(cluster, "decode", prompt),
    ]


async def _gone(cluster: ServingCluster, slot: str, began: float) -> tuple[int | None, float]:
    """Wait until a worker has ended. Return its exit code (None if it had to be killed), and the
    seconds until its end.
    """
    worker = cluster.workers[slot]
    try:
        code = await worker.ended(_GIVE_UP_S)
    except DeadlineExceeded:
        worker.signal(signal.SIGKILL)
        took_s = time.perf_counter() - began
        await worker.ended(_GIVE_UP_S)
        return None, took_s
    return code, time.perf_counter() - began


async def _replaced(cluster: ServingCluster, role: str, prompt: Sequence[int]) -> list[Result]:
    """Start the missing worker of this role, and check that it takes part in a handoff."""
    began = time.perf_counter()
    await cluster.ensure()
    deadline = began + _ANSWER_S
    before = await cluster.look("decode-0")
    asked = [Asked(tuple(prompt), 2)]
    answers = await cluster.answers("handoff", asked)
    # A router may use the previous worker while that one is registered.
    while not _handoffs(before, await cluster.look("decode-0")) and time.perf_counter() < deadline:
        answers = await cluster.answers("handoff", asked)
    ready_s = time.perf_counter() - began
    handoffs = _handoffs(before, await cluster.look("decode-0"))
    expected = await cluster.expected(asked)
    return [
        Timing(f"replacement {role} worker is ready", ready_s),
        Check(f"replacement {role} workers without a handoff", int(handoffs == 0), 0),
        Check(f"wrong answers of a replacement {role} worker", _differing(answers, expected), 0),
    ]


async def _check_memory(
    cluster: ServingCluster, own_bytes: int, busy: Fields, killed_at: float
) -> list[Result]:
    """Check that the killed worker's GPU memory is free again, although the decode worker had
    mapped it.
    """

    def kept(now: Fields) -> float:
        """Return the MiB of the killed worker's memory that are not free again. Memory that the
        decode worker has allocated since does not count."""
        freed = now["free_bytes"] - busy["free_bytes"]
        return float(own_bytes - freed - (now["own_bytes"] - busy["own_bytes"])) / MIB

    now = await _until(cluster, lambda seen: kept(seen) <= _KEPT_MIB, _RELEASE_S)
    took_s = time.perf_counter() - killed_at
    now = now or await cluster.look("decode-0")
    return [
        Check("MiB of a killed worker that stay allocated", max(0.0, kept(now)), _KEPT_MIB),
        Timing("a killed worker's memory is free", took_s),
        Fact(
            "GPU memory and a killed worker",
            {
                "its_own_bytes": own_bytes,
                "free_bytes_before": busy["free_bytes"],
                "free_bytes_after": now["free_bytes"],
            },
        ),
    ]


async def _until(
    cluster: ServingCluster, condition: Callable[[Fields], bool], within_s: float
) -> Fields | None:
    """Wait until ``condition`` holds for the decode worker's state, and return the state; None if
    that takes more than ``within_s`` seconds.
    """
    deadline = time.perf_counter() + within_s
    while not condition(now := await cluster.look("decode-0")):
        if time.perf_counter() > deadline:
            return None
        await asyncio.sleep(_POLL_S)
    return now


# Load


async def _clients(
    target: HttpTarget, sizes: Sizes, dice: random.Random, count: int, rounds: int
) -> list[StreamResult]:
    clients = (_client(target, sizes, dice, rounds) for _ in range(count))
    return [answer for answers in await asyncio.gather(*clients) for answer in answers]


async def _client(
    target: HttpTarget, sizes: Sizes, dice: random.Random, rounds: int
) -> list[StreamResult]:
    answers = []
    for _ in range(rounds):
        prompt = "".join(dice.choices("abcdefgh ", k=sizes.load_prompt))
        answer = await target.begin(prompt, sizes.load_tokens)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await answer.ended.wait()
        except TimeoutError:
            answer.error = f"no end in {_ANSWER_S:.0f} s"
        answers.append(answer)
    return answers


def load_results(
    answers: Sequence[StreamResult], tokens: int, concurrency: int, took_s: float
) -> list[Result]:
    """Return results of the load test: its answers have ``tokens`` tokens each, and all together
    took ``took_s`` seconds.
    """
    failed = [answer for answer in answers if answer.error or answer.tokens != tokens]
    good = [answer for answer in answers if answer not in failed]
    at = f"at concurrency {concurrency}"
    told: Fields = {"ok": len(good), "failed": len(failed)}
    if failed:
        told["errors"] = sorted({one.error or f"{one.tokens} tokens came" for one in failed})[:3]
    results: list[Result] = [
        Check(f"requests that failed {at}", len(failed), 0),
        Fact(f"requests {at}", told),
    ]
    if good:
        ttft = statistics.median(answer.first - answer.began for answer in good)
        tpot = statistics.median((answer.last - answer.first) / (tokens - 1) for answer in good)
        results += [
            Timing(f"TTFT p50 {at}", ttft),
            Timing(f"TPOT p50 {at}", tpot),
            Timing(f"time per token of all requests {at}", took_s / (len(good) * tokens)),
        ]
    return results


# Comparisons


def _prompt(dice: random.Random, length: int) -> tuple[int, ...]:
    return tuple(dice.choices(range(_TOKENS), k=length))


def _differing(found: Sequence[ServedTokens], expected: Sequence[ServedTokens]) -> int:
    return sum(one.tokens != other.tokens for one, other in zip(found, expected, strict=True))


def _handoffs(before: Fields, after: Fields) -> int:
    """Return the number of handoffs that the decode worker received between two observations of its
    state.
    """
    return int(sum(after["received_handoffs"].values()) - sum(before["received_handoffs"].values()))


def _wanted_transport(now: Fields) -> str:
    """Return the transport that a prefill and a decode worker on one host should choose."""
    return "cuda_ipc" if "free_bytes" in now else "shm"


def _others(handoffs: dict[str, float], wanted: str) -> int:
    return int(sum(count for name, count in handoffs.items() if name != wanted))


def _errors(found: Sequence[ServedTokens]) -> Fields:
    """Return the first errors of failed answers, if any."""
    errors = [answer.error for answer in found if answer.error]
    return {"errors": errors[:3]} if errors else {}
