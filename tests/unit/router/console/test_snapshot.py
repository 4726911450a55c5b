"""What is shown of what was seen."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from baton.config.cluster import Config
from baton.config.money import PricesConfig
from router.console.rates import CounterWindow, Key
from router.console.snapshot import (
    CostView,
    Observation,
    ObservedWorker,
    Snapshot,
    page_counts,
    snapshot_of,
)
from router.console.worker_page import WorkerPage
from router.http.sse import to_json
from tests.support.router.looks import CONFIG, look, record, seen

SHORT = CONFIG.classes[0].name


def shown(
    first: Observation, second: Observation, *, seconds: float = 10.0, config: Config = CONFIG
) -> Snapshot:
    """The second look's snapshot, ``seconds`` after the first one."""
    window, pages = CounterWindow(60), CounterWindow(60)
    for at, one in ((0.0, first), (seconds, second)):
        window.add(at, one.counts)
        pages.add(at, page_counts(one.pages))
    return snapshot_of(second, window, pages, config)


def test_the_first_snapshot_has_workers_and_no_rates() -> None:
    window = CounterWindow(60)
    one = look(
        seen("prefill-0"),
        seen(running=3, waiting=2, used_blocks=10, cached_blocks=20, free_blocks=970),
        gauges={("active",): 4.0, ("waiting", "a"): 2.0, ("waiting", "b"): 0.0},
    )
    window.add(0.0, one.counts)
    found = snapshot_of(one, window, CounterWindow(60), CONFIG)
    assert (found.rate_s, found.window_s) == (0.0, 0.0)
    assert [worker.slot for worker in found.workers] == ["prefill-0", "decode-0"]
    decode = found.workers[1]
    assert (decode.running, decode.waiting, decode.used_blocks) == (3, 2, 10)
    assert decode.batch_fill == 3 / 8
    assert (found.traffic.active, found.traffic.waiting) == (4, 2)
    assert [(one.tenant, one.waiting) for one in found.queues] == [("a", 2)]
    assert found.traffic.good_share is None
    assert found.classes[0].ttft.lately is None
    assert found.pages_missing == 2
    # What goes to a browser is JSON, without infinities.
    json.loads(to_json(asdict(found)), parse_constant=pytest.fail)


def test_rates_and_shares() -> None:
    def counts(ok: float, shed: float, good: float, prompt: float, cached: float) -> Observation:
        key: dict[Key, float] = {
            ("requests", SHORT, "ok", ""): ok,
            ("requests", "unknown", "shed", "overloaded"): shed,
            ("requests", SHORT, "aborted", ""): 100 * ok,
            ("goodput_requests", SHORT): good,
            ("prompt_tokens", SHORT): prompt,
            ("cached_prompt_tokens", SHORT): cached,
            ("generated_tokens", SHORT): 2 * prompt,
        }
        return look(counts=key)

    traffic = shown(counts(0, 0, 0, 0, 0), counts(10, 2, 9, 1000, 250)).traffic
    assert traffic.requests_per_s == pytest.approx((10 + 2 + 1000) / 10)
    assert traffic.prompt_tokens_per_s == 100
    assert traffic.output_tokens_per_s == 200
    assert traffic.cached_share == 0.25
    assert traffic.good_share == 9 / 12, "aborted ones are not due"
    assert (traffic.shed, traffic.failed) == (2, 0)


def test_costs_are_those_of_the_window() -> None:
    def counts(times: int) -> Observation:
        key: dict[Key, float] = {
            ("cost_dollars", "input"): 0.25 * times,
            ("cost_dollars", "cached_input"): 0.25 * times,
            ("cost_dollars", "output"): 1.5 * times,
            ("requests", SHORT, "ok", ""): 3.0 * times,
            ("requests", SHORT, "aborted", ""): 1.0 * times,
            ("requests", SHORT, "shed", "overloaded"): 9.0 * times,
            ("prompt_tokens", SHORT): 1e6 * times,
            ("generated_tokens", SHORT): 5e5 * times,
        }
        return look(counts=key)

    priced = CONFIG.model_copy(update={"prices": PricesConfig(input=1.0, output=3.0)})
    cost = shown(counts(0), counts(1), config=priced).cost
    assert cost == CostView(2.0 / 10 * 3600, 0.5, 0.5, 3.0)
    idle = shown(counts(0), counts(0), config=priced).cost
    assert idle == CostView(0.0, None, None, None)
    assert shown(counts(0), counts(1)).cost is None, "tokens have no price"


def test_percentiles_of_a_class_and_of_all() -> None:
    def counts(short: float, long: float) -> Observation:
        buckets: dict[Key, float] = {}
        for name, value in ((SHORT, short), (CONFIG.classes[-1].name, long)):
            buckets[("ttft", name, "0.1")] = value if name == SHORT else 0.0
            buckets[("ttft", name, "1.0")] = value
            buckets[("ttft", name, "+Inf")] = value
        return look(counts=buckets)

    found = shown(counts(100, 0), counts(200, 100))
    every, short, *_, long = found.classes
    assert every.name == "all classes"
    assert short.ttft.lately is not None
    assert long.ttft.lately is not None
    assert every.ttft.lately is not None
    assert short.ttft.lately.p99 <= 0.1 < long.ttft.lately.p50
    assert (short.ttft.lately.count, every.ttft.lately.count) == (100, 200)
    assert short.ttft.all is not None
    assert short.ttft.all.count == 200
    assert short.slo_ttft_s == CONFIG.slo_ttft_of(SHORT)


def test_all_classes_have_an_slo_if_it_is_one() -> None:
    def slos(**changes: float) -> list[float | None]:
        one, *others = CONFIG.classes
        classes = (one.model_copy(update=changes), *others)
        found = shown(look(), look(), config=CONFIG.model_copy(update={"classes": classes}))
        return [one.slo_ttft_s for one in found.classes[:3]]

    assert slos() == [2.0, 2.0, 2.0]
    assert slos(slo_ttft_s=0.7) == [None, 0.7, 2.0]


def test_transfers_are_those_of_pairs_and_of_bytes() -> None:
    def pages(count: float, *, other: float = 0.0) -> Observation:
        sends = WorkerPage(0.5, 77, {"decode-0": "shm", "decode-9": "shm"}, {})
        takes = WorkerPage(
            0.25,
            0,
            {},
            {
                ("received", "prefill-0", "shm"): count,
                ("received", "decode-1", "grpc"): other,
                ("handoffs", "ok"): count / 100,
                ("handoffs", "expired"): 1.0 if count else 0.0,
                ("handoffs", "aborted"): 50.0 if count else 0.0,
                ("handoff_seconds", "0.1"): count / 100,
                ("handoff_seconds", "+Inf"): count / 100,
            },
        )
        workers = seen("prefill-0"), seen(), seen("decode-1")
        return look(*workers, pages={"prefill-0": sends, "decode-0": takes})

    found = shown(pages(0), pages(5000))
    (pair,) = found.transfers
    assert (pair.writer, pair.receiver, pair.transport) == ("prefill-0", "decode-0", "shm")
    assert (pair.bytes_per_s, pair.moved) == (500, True)
    assert found.handoffs.per_s == 5
    assert found.handoffs.failed == 1, "what clients ended did not fail"
    assert found.handoffs.seconds is not None
    assert found.workers[0].in_flight_bytes == 77
    assert found.workers[1].batch_fill == 0.25
    assert found.pages_missing == 1
    still = shown(pages(5000), pages(5000))
    assert [one.moved for one in still.transfers] == [False]
    pulled = shown(pages(0), pages(0, other=10))
    assert ("decode-1", "decode-0", "grpc") in {
        (one.writer, one.receiver, one.transport) for one in pulled.transfers
    }


def test_states_of_workers() -> None:
    draining = ObservedWorker(record("decode-1", state="draining"), seen().load, False)
    found = shown(look(), look(seen(is_up=False), draining))
    assert [worker.state for worker in found.workers] == ["unreachable", "draining"]
    pools = {pool.name: pool for pool in found.pools}
    assert (pools["decode"].workers, pools["decode"].ready) == (2, 0)
    assert pools["prefill"].workers == 0, "a pool without workers is shown"


def test_workers_are_sorted_by_number() -> None:
    names = ["decode-10", "decode-2", "prefill-0", "decode"]
    found = shown(
        look(), look(*(ObservedWorker(record(name), seen().load, True) for name in names))
    )
    order = [worker.slot for worker in found.workers]
    assert order == ["prefill-0", "decode", "decode-2", "decode-10"]


def test_a_worker_of_an_unknown_pool_is_shown() -> None:
    other = ObservedWorker(replace(record(), pool="extra"), seen().load, True)
    found = shown(look(), look(other))
    assert [pool.name for pool in found.pools] == ["prefill", "decode", "extra"]


def test_figures_are_those_of_the_page() -> None:
    first = look(counts={("requests", SHORT, "ok", ""): 0.0, ("ttft", SHORT, "+Inf"): 0.0})
    second = look(
        seen("prefill-0", waiting=2),
        seen(waiting=1),
        counts={
            ("requests", SHORT, "ok", ""): 20.0,
            ("ttft", SHORT, "1.0"): 20.0,
            ("ttft", SHORT, "+Inf"): 20.0,
        },
        gauges={("waiting", "a"): 4.0},
    )
    found = shown(first, second)
    figures = found.figures
    assert (figures.requests_per_s, figures.waiting) == (2.0, 7)
    assert found.classes[0].ttft.lately is not None
    assert figures.ttft_p95_s == found.classes[0].ttft.lately.p95
    assert (figures.tpot_p95_s, figures.cost_per_hour) == (None, None)
