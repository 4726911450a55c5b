from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from baton.telemetry.worker_metrics import WorkerMetrics
from router.console.worker_page import read_page


def test_a_workers_page_is_parsed() -> None:
    """Of the real declarations: a series that is renamed is missed here."""
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.batch_fill_ratio.labels(worker="decode-0", role="decode").set(0.5)
    metrics.transfer_in_flight.labels(worker="decode-0").set(4096)
    metrics.transfer_pairs.labels(worker="decode-0", peer="decode-1", transport="grpc").set(1)
    metrics.received_bytes.labels("decode-0", "prefill-0", "shm").inc(1 << 20)
    metrics.handoffs.labels(transport="shm", outcome="ok").inc(2)
    metrics.handoffs.labels(transport="grpc", outcome="ok").inc(3)
    metrics.handoff_seconds.labels(transport="shm").observe(0.02)
    page = read_page(generate_latest(metrics.registry).decode())
    assert page.batch_fill == 0.5
    assert page.in_flight_bytes == 4096
    assert page.peers == {"decode-1": "grpc"}
    assert page.counts[("received", "prefill-0", "shm")] == 1 << 20
    assert page.counts[("handoffs", "ok")] == 5
    assert page.counts[("handoff_seconds", "+Inf")] == 1
    assert page.counts[("handoff_seconds", "0.01")] == 0


def test_an_empty_page() -> None:
    page = read_page("")
    assert (page.batch_fill, page.in_flight_bytes) == (None, 0)
    assert not page.counts
