"""The policy that decides by predicted milliseconds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.choices import LocalPrefill
from baton.request import LoadSnapshot
from router.routing.cost_model import TransferCosts
from router.routing.policy import MAX_SLOWDOWN, ClassRoute, Decision, RouteRequest, RouteSettings
from router.routing.predictive_policy import (
    ANSWER_TOKENS,
    CACHE_KEY,
    DEADLINE,
    MIN_HARM,
    MIN_TTFT,
    NO_ROOM,
    OTHERS_WEIGHT,
    PREFIX,
    PULL,
    SPREAD_PROMPTS,
    SPREAD_WEIGHT,
    TIE,
    PredictivePolicy,
)
from router.routing.routing_state import RoutingState
from router.routing.worker_table import WorkerTable, preferred_row
from tests.support.router.workers import BLOCK, PREFILL_COST, list_worker, record, table_of

ROOT = Path(__file__).parents[4]


def test_the_score_is_that_of_the_document() -> None:
    """docs/explanation/routing.md: ttft + 4*compute + 5*full*(work - mean)/(mean + 6*full) +
    32*tpot."""
    weights = (OTHERS_WEIGHT, SPREAD_WEIGHT, SPREAD_PROMPTS, ANSWER_TOKENS)
    assert weights == (4, 5, 6, 32)
    formula = "ttft + {:g}*compute + {:g}*full*(work - mean)/(mean + {:g}*full) + {:g}*tpot"
    assert formula.format(*weights) in (ROOT / "docs/explanation/routing.md").read_text()


def decide(
    table: WorkerTable,
    request: RouteRequest,
    held: dict[str, int] | None = None,
    *,
    route: ClassRoute | None = None,
    transfers: TransferCosts | None = None,
    pulls: bool = False,
) -> Decision:
    policy = PredictivePolicy(RouteSettings(default=route or ClassRoute(), pulls=pulls))
    return policy.decide(request, table, transfers or TransferCosts(), held or {}, 0.0)


def cost(tokens: float, cached: float = 0.0) -> float:
    a, b, c = PREFILL_COST
    n = tokens - cached
    return a + b * n + c * n * (cached + n / 2)


def own_worker(table: WorkerTable, cache_key: str) -> str:
    rows = table.group("prefill").rows
    return table.names[preferred_row(table, rows, cache_key)]


def test_requests_with_a_cache_key_meet_at_one_worker_before_anything_is_cached() -> None:
    table = table_of("p0", "p1", "p2", "p3", "d0")
    for cache_key in ("a", "b", "c", "d"):
        for prompt in (500, 900):
            decision = decide(table, RouteRequest(prompt, cache_key=cache_key))
            assert decision.prefill == own_worker(table, cache_key)
            assert decision.reason == CACHE_KEY
    assert len({own_worker(table, str(number)) for number in range(32)}) == 4


def test_beyond_the_shortlist_the_worker_of_the_cache_key_is_a_candidate() -> None:
    table = table_of(*(f"p{number}" for number in range(40)), "d0")
    for cache_key in map(str, range(10)):
        decision = decide(table, RouteRequest(500, cache_key=cache_key))
        assert decision.prefill == own_worker(table, cache_key)


def test_a_cache_key_gives_way_to_a_longer_prefix_and_to_the_slo() -> None:
    table = table_of("p0", "p1", "d0")
    own = own_worker(table, "a")
    (other,) = {"p0", "p1"} - {own}
    request = RouteRequest(1600, cache_key="a")
    assert decide(table, request).prefill == own
    assert decide(table, request, {other: 90}).prefill == other
    assert decide(table, request, {own: 90, other: 90}).prefill == own
    busy = LoadSnapshot(free_blocks=4000, waiting=9, waiting_tokens=40_000)
    table.set_load(own, busy, 0.0)
    assert decide(table, request).prefill == other


# A plain second opinion, pair by pair


@dataclass(frozen=True)
class Pair:
    source: str
    target: str
    ttft: float
    tpot: float
    score: float
    room: bool


def every_pair(
    table: WorkerTable,
    transfers: TransferCosts,
    request: RouteRequest,
    held: dict[str, int],
    route: ClassRoute,
) -> list[Pair]:
    prompt = request.prompt_tokens
    decode = [table.names[r] for r in table.group("decode").rows]
    prefill = [table.names[r] for r in table.group("prefill").rows]
    found = []
    for source in (*prefill, *decode):
        local = source in decode
        if (local and route.local_prefill == "never") or (
            not local and route.local_prefill == "always"
        ):
            continue
        group = decode if local else prefill
        for target in (source,) if local else decode:
            p, d = table.row(source), table.row(target)
            assert p is not None
            assert d is not None
            a, b, c = table.prefill_a[p], table.prefill_b[p], table.prefill_c[p]

            def computing(cached: float, a: float = a, b: float = b, c: float = c) -> float:
                n = prompt - cached
                return a + b * n + c * n * (prompt + cached) / 2

            took = computing(min(held.get(source, 0) * BLOCK, prompt - 1))
            full = computing(0)
            mean = sum(table.work[table.row(name)] for name in group) / len(group)
            missing = max(0, -(-prompt // BLOCK) - held.get(target, 0))
            sa, sb, sc = table.step_a[d], table.step_b[d], table.step_c[d]
            tpot = sa + sb * (table.sequences[d] + 1) + sc * (table.context_tokens[d] + prompt)
            room = (
                missing <= table.available_blocks[d] and table.sequences[d] < table.max_sequences[d]
            )
            ttft = float(table.queue_ms(0.0)[p]) + took
            score = ttft + OTHERS_WEIGHT * took + ANSWER_TOKENS * tpot
            score += SPREAD_WEIGHT * full * (table.work[p] - mean) / (mean + SPREAD_PROMPTS * full)
            if local:
                step = sa + sb * table.running[d] + sc * table.context_tokens[d]
                usual = sum(table.running[table.row(name)] for name in decode) / len(decode)
                score += (took - a) * max(table.running[d], usual)
                if table.running[d]:
                    longest = min(route.slo_tpot_ms, MAX_SLOWDOWN * step)
                    chunk = min(took, max(longest - step, b * 16))
                    ttft += took / chunk * step
                    score += took / chunk * step
                    tpot = max(tpot, step + chunk)
            else:
                first, each = transfers.line(source, target)
                ttft += first + each * missing
                score += first + each * missing
            found.append(Pair(source, target, ttft, tpot, score, bool(room)))
    return found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[WorkerTable, dict[str, int], TransferCosts]:
    table, held, transfers = WorkerTable(BLOCK), {}, TransferCosts()
    slots = [f"p-{n}" for n in range(draw(st.integers(1, 5)))]
    slots += [f"d-{n}" for n in range(draw(st.integers(1, 5)))]
    for slot in slots:
        running = draw(st.integers(0, 12))
        load = LoadSnapshot(
            running=running,
            context_tokens=running * draw(st.integers(1, 2000)),
            waiting=(waiting := draw(st.integers(0, 3))),
            waiting_tokens=waiting * 200,
            free_blocks=draw(st.sampled_from((20, 100, 1000))),
        )
        b = draw(st.floats(0.05, 2.0))
        listed = record(slot, max_sequences=12, prefill_cost=(5.0, b, b / 2000))
        list_worker(table, listed, load)
        table.promise_prompt(slot, draw(st.floats(0.0, 300.0)), 0.0)
        held[slot] = draw(st.integers(0, 60))
    for source, target in draw(
        st.lists(st.tuples(st.sampled_from(slots), st.sampled_from(slots)), max_size=4)
    ):
        transfers.observe(source, target, 10, draw(st.floats(1.0, 100.0)))
    return table, held, transfers


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    clusters(),
    st.integers(1, 2500),
    st.sampled_from(("auto", "never", "always")),
    st.sampled_from((12.0, 25.0, 100.0)),
    st.sampled_from((50.0, 800.0, float("inf"))),
)
def test_it_equals_brute_force_over_all_pairs(
    cluster: tuple[WorkerTable, dict[str, int], TransferCosts],
    tokens: int,
    local: LocalPrefill,
    slo_tpot_ms: float,
    deadline_ms: float,
) -> None:
    table, held, transfers = cluster
    route = ClassRoute(local, slo_ttft_ms=400.0, slo_tpot_ms=slo_tpot_ms)
    request = RouteRequest(tokens, deadline_ms=deadline_ms)
    decision = decide(table, request, held, route=route, transfers=transfers)
    pairs = every_pair(table, transfers, request, held, route)
    (chosen,) = [p for p in pairs if (p.source, p.target) == (decision.prefill, decision.decode)]
    assert decision.ttft_ms == pytest.approx(chosen.ttft)
    assert decision.tpot_ms == pytest.approx(chosen.tpot)
    in_time = [pair for pair in pairs if pair.ttft <= deadline_ms]
    assert decision.shed == (not in_time)
    if not in_time:
        assert decision.reason == DEADLINE
        assert chosen.ttft == pytest.approx(min(pair.ttft for pair in pairs))
        return
    fitting = [pair for pair in in_time if pair.room]
    assert (decision.reason == NO_ROOM) == (not fitting)
    best = fitting or in_time
    good = [pair for pair in best if pair.tpot <= slo_tpot_ms]
    if not good:
        assert decision.reason in {MIN_HARM, NO_ROOM}
        harm = [pair.ttft / 400.0 + pair.tpot / slo_tpot_ms for pair in best]
        mine = chosen.ttft / 400.0 + chosen.tpot / slo_tpot_ms
        assert mine == pytest.approx(min(harm))
        return
    assert chosen.tpot <= slo_tpot_ms
    best = [pair for pair in good if pair.ttft <= 400.0] or good
    assert chosen in best
    rows = {table.row(pair.source) for pair in pairs}
    margin = TIE * min(
        table.prefill_a[r] + tokens * (table.prefill_b[r] + table.prefill_c[r] * tokens / 2)
        for r in rows
    )
    assert chosen.score <= min(pair.score for pair in best) + margin + 1e-6


# What it is for


def test_the_shortest_predicted_time_is_taken_and_told() -> None:
    table = table_of("p-0", "p-1", "d-0")
    table.promise_prompt("p-0", 100.0, 0.0)
    decision = decide(table, RouteRequest(160))
    assert (decision.prefill, decision.decode, decision.reason) == ("p-1", "d-0", MIN_TTFT)
    assert decision.prefill_ms == pytest.approx(cost(160))
    assert decision.ttft_ms == pytest.approx(cost(160) + 2.0 + 0.3 * 10)
    assert decision.tpot_ms == pytest.approx(8.0 + 1.0 + 0.16)


def test_a_prefix_outweighs_a_queue_that_is_not_much_longer() -> None:
    table = table_of("p-0", "p-1", "d-0")
    table.promise_prompt("p-0", 100.0, 0.0)
    decision = decide(table, RouteRequest(1000), {"p-0": 50})
    assert (decision.prefill, decision.reason) == ("p-0", PREFIX)
    assert decision.uncached_tokens == 200
    table.promise_prompt("p-0", 20_000.0, 0.0)
    assert decide(table, RouteRequest(1000), {"p-0": 50}).prefill == "p-1"


def test_the_slo_of_a_decode_worker_is_respected() -> None:
    table = WorkerTable(BLOCK)
    for slot in ("p-0", "d-0", "d-1"):
        list_worker(table, record(slot))
    table.set_load("d-0", LoadSnapshot(running=30, free_blocks=4000), 0.0)
    # It holds the whole prompt, and a step with one more sequence takes 39.1 ms.
    held = {"d-0": 1000 // BLOCK}
    assert decide(table, RouteRequest(100), held, route=ClassRoute(slo_tpot_ms=39.0)).decode == (
        "d-1"
    )
    table.set_load("d-1", LoadSnapshot(running=40, free_blocks=4000), 0.0)
    decision = decide(table, RouteRequest(100), held, route=ClassRoute(slo_tpot_ms=39.0))
    assert (decision.decode, decision.reason) == ("d-0", MIN_HARM)


def test_a_deadline_that_cannot_be_met_sheds() -> None:
    table = table_of("p-0", "d-0")
    table.promise_prompt("p-0", 5000.0, 0.0)
    decision = decide(table, RouteRequest(100, deadline_ms=4000.0))
    assert decision.shed
    assert decision.reason == DEADLINE
    assert decision.queue_ms == pytest.approx(5000.0)
    assert not decide(table, RouteRequest(100, deadline_ms=6000.0)).shed


def test_short_prompts_stay_at_an_idle_decode_worker_long_ones_do_not() -> None:
    table = table_of("p-0", "d-0")
    auto = ClassRoute("auto")
    assert decide(table, RouteRequest(20), route=auto).local
    busy = LoadSnapshot(running=16, free_blocks=4000, context_tokens=8000)
    table.set_load("d-0", busy, 0.0)
    assert not decide(table, RouteRequest(2000), route=auto).local
    assert decide(table, RouteRequest(2000), {"d-0": 124}, route=auto).local, "it holds it"


def test_an_idle_decode_worker_is_kept_free_of_long_prompts_where_others_run() -> None:
    table = table_of("p-0", "d-0", "d-1")
    auto = ClassRoute("auto")
    # No worker disturbs another, and there is no handoff.
    assert decide(table, RouteRequest(2000), route=auto).local
    table.set_load("d-1", LoadSnapshot(running=2, free_blocks=4000, context_tokens=1000), 0.0)
    assert not decide(table, RouteRequest(2000), route=auto).local
    assert decide(table, RouteRequest(4), route=auto).local, "it is over at once"
    table.promise_prompt("p-0", 2000.0, 0.0)
    decision = decide(table, RouteRequest(2000), route=auto)
    assert (decision.decode, decision.local) == ("d-0", True), "prefill workers are busier"


def test_a_prefill_worker_on_a_decode_workers_cores_computes_nothing() -> None:
    """Unless decode workers may not, or the decode worker there is not up."""
    table = WorkerTable(BLOCK)
    for slot in ("p-0", "d-0"):
        list_worker(table, record(slot, host="a", shares_cores=True))
    busy = LoadSnapshot(running=16, free_blocks=4000, context_tokens=8000)
    table.set_load("d-0", busy, 0.0)
    request, auto = RouteRequest(2000), ClassRoute("auto")
    assert decide(table, request, route=auto).local
    assert not decide(table, request).local, "local prefill is never"
    # A prefill worker elsewhere takes no cores from decode workers.
    list_worker(table, record("p-1", host="b", shares_cores=True))
    assert decide(table, request, route=auto).prefill == "p-1"
    list_worker(table, record("d-1", host="c", shares_cores=True))
    table.set_load("d-1", busy, 0.0)
    table.set_up("d-0", False)
    table.set_up("p-1", False)
    decision = decide(table, request, route=auto)
    assert (decision.prefill, decision.decode) == ("p-0", "d-1")


def test_a_prefill_worker_on_a_decode_workers_gpu_computes_nothing() -> None:
    table = WorkerTable(BLOCK)
    busy = LoadSnapshot(running=16, free_blocks=4000, context_tokens=8000)
    list_worker(table, record("p-0", gpu="a"))
    list_worker(table, record("d-0", gpu="a"), busy)
    request, auto = RouteRequest(2000), ClassRoute("auto")
    assert decide(table, request, route=auto).local
    assert not decide(table, request).local, "local prefill is never"
    # Another GPU of the same host is its own.
    list_worker(table, record("p-1", gpu="b"))
    assert decide(table, request, route=auto).prefill == "p-1"


def test_workers_that_name_no_gpu_share_none() -> None:
    """As those of an older version."""
    table = WorkerTable(BLOCK)
    list_worker(table, record("p-0"))
    list_worker(table, record("d-0"), LoadSnapshot(running=16, free_blocks=4000))
    assert not decide(table, RouteRequest(2000), route=ClassRoute("auto")).local


def test_blocks_are_fetched_where_that_is_faster() -> None:
    table = table_of("p-0", "p-1", "d-0")
    table.promise_prompt("p-0", 100_000.0, 0.0)
    decision = decide(table, RouteRequest(1601), {"p-0": 100}, pulls=True)
    assert (decision.prefill, decision.holder, decision.reason) == ("p-1", "p-0", PULL)
    assert (decision.holder_blocks, decision.uncached_tokens) == (100, 1)
    fetching = 2.0 + 0.3 * 100
    assert decision.prefill_ms == pytest.approx(fetching + cost(1601, 1600))
    slow = TransferCosts()
    for _ in range(50):
        slow.observe("p-0", "p-1", 100, 100_000.0)
    decision = decide(table, RouteRequest(1601), {"p-0": 100}, transfers=slow, pulls=True)
    assert decision.reason != PULL
    assert decision.uncached_tokens == 1601


def test_of_unequal_shapes_nothing_is_fetched() -> None:
    table = table_of("p-1", "d-0")
    list_worker(table, record("p-0", block_size=32))
    table.promise_prompt("p-0", 100_000.0, 0.0)
    decision = decide(table, RouteRequest(1601), {"p-0": 100}, pulls=True)
    assert (decision.prefill, decision.holder, decision.uncached_tokens) == ("p-1", "", 1601)


# What it must not do


def replay(
    table_slots: tuple[str, ...],
    prompts: list[tuple[float, int, list[bytes]]],
    *,
    instant: bool = False,
) -> Counter[str]:
    """Times, tokens and hashes; caches are unbounded, and the index knows at once what was placed.

    ``instant``: every prompt is computed before the next one comes.
    """
    routing = RoutingState(PredictivePolicy(RouteSettings(pulls=False)), BLOCK)
    for slot in table_slots:
        list_worker(routing.table, record(slot))
    caches: dict[str, set[bytes]] = {}
    counts: Counter[str] = Counter()
    for now, tokens, hashes in prompts:
        held = {
            name: next((n for n, h in enumerate(hashes) if h not in cache), len(hashes))
            for name, cache in caches.items()
        }
        request = RouteRequest(tokens)
        decision = routing.decide(request, hashes, held, now)
        promise = routing.promise(decision, request, hashes, now)
        if instant:
            promise.ended(now)
        caches.setdefault(decision.prefill, set()).update(hashes)
        counts[decision.prefill] += decision.uncached_tokens
    return counts


def one_first_block(count: int, every_s: float) -> list[tuple[float, int, list[bytes]]]:
    """Prompts that share their first block and nothing more."""
    dice = random.Random(1)
    prompts = []
    for number in range(count):
        blocks = dice.randint(2, 8)
        own = [bytes([n]) + number.to_bytes(15, "big") for n in range(1, blocks)]
        prompts.append((number * every_s, blocks * BLOCK + 1, [bytes(16), *own]))
    return prompts


@pytest.mark.parametrize(("every_s", "instant"), [(0.01, False), (1.0, True)])
def test_a_first_block_that_all_share_does_not_herd(every_s: float, *, instant: bool) -> None:
    """Neither in a rush nor without any waiting."""
    slots = ("p-0", "p-1", "p-2", "p-3", "d-0")
    counts = replay(slots, one_first_block(800, every_s), instant=instant)
    assert max(counts.values()) <= 1.1 * sum(counts.values()) / 4


def test_a_burst_with_one_prefix_lands_together() -> None:
    """No event has come yet: the blocks are expected where the first one went."""
    routing = RoutingState(PredictivePolicy(RouteSettings(pulls=False)), BLOCK)
    for slot in ("p-0", "p-1", "p-2", "d-0"):
        list_worker(routing.table, record(slot))
    hashes = [bytes([n]) * 16 for n in range(1, 61)]
    chosen = set()
    for _ in range(5):
        request = RouteRequest(60 * BLOCK + 5)
        decision = routing.decide(request, hashes, {}, 0.0)
        routing.promise(decision, request, hashes, 0.0)
        chosen.add(decision.prefill)
    assert len(chosen) == 1


def test_equal_workers_are_used_equally() -> None:
    routing = RoutingState(PredictivePolicy(RouteSettings()), BLOCK)
    for slot in ("p-0", "p-1", "p-2", "d-0", "d-1"):
        list_worker(routing.table, record(slot))
    prefill: Counter[str] = Counter()
    decode: Counter[str] = Counter()
    for number in range(60):
        request = RouteRequest(100)
        decision = routing.decide(request, (), {}, float(number))
        routing.promise(decision, request, (), float(number)).ended(float(number))
        prefill[decision.prefill] += 1
        decode[decision.decode] += 1
    assert set(prefill.values()) == {20}
    assert set(decode.values()) == {30}


def test_a_shortlist_is_as_good_as_all_workers() -> None:
    """With more workers than are compared in pairs the best of each role is still found."""
    slots = [f"p-{n}" for n in range(40)] + [f"d-{n}" for n in range(40)]
    table = table_of(*slots)
    for number in range(40):
        if number != 23:
            table.promise_prompt(f"p-{number}", 500.0 + number, 0.0)
        if number != 31:
            table.set_load(f"d-{number}", LoadSnapshot(running=5, free_blocks=4000), 0.0)
    decision = decide(table, RouteRequest(300))
    assert (decision.prefill, decision.decode) == ("p-23", "d-31")


class Counted(np.ndarray):
    """An array that counts the passes over columns as long as the table."""

    rows = 0
    passes = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):  # type: ignore[no-untyped-def]
        if out is not None:
            options["out"] = tuple(one.view(np.ndarray) for one in out)
        plain = [one.view(np.ndarray) if isinstance(one, Counted) else one for one in inputs]
        Counted.passes += any(np.size(one) >= Counted.rows for one in plain)
        found = getattr(ufunc, method)(*plain, **options)
        if out is not None:
            return out[0]
        return found.view(Counted) if isinstance(found, np.ndarray) else found


@pytest.mark.parametrize(("local", "most"), [("never", 50), ("auto", 85)])
def test_a_decision_makes_a_bounded_number_of_passes_over_the_table(
    local: LocalPrefill, most: int
) -> None:
    table = table_of(*(f"{role}-{n}" for role in "pd" for n in range(200)))
    for name, column in vars(table).items():
        if isinstance(column, np.ndarray):
            setattr(table, name, column.view(Counted))
    Counted.rows, Counted.passes = len(table.names), 0
    policy = PredictivePolicy(RouteSettings(BLOCK, default=ClassRoute(local)))
    policy.decide(RouteRequest(2000), table, TransferCosts(), {"p-3": 50, "d-7": 20}, 0.0)
    assert 20 < Counted.passes <= most, "each takes microseconds with ten thousand workers"
