"""What is noticed between two looks at a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.store.supervision import ScalingDecision, SlotDeaths, SupervisionReport
from router.console import events
from router.console.events import CertificateWatch, ClusterWatch, EventLog, Level
from router.console.rates import Key
from router.console.snapshot import Observation, ObservedWorker
from tests.support.certificates import Authority
from tests.support.router.looks import look, seen


class Watched:
    """A cluster that is looked at once a second."""

    def __init__(self, *workers: ObservedWorker) -> None:
        self.log = EventLog()
        self.watch = ClusterWatch(self.log)
        self.at = 0.0
        self.look(*workers)

    def look(self, *workers: ObservedWorker, **more: Any) -> list[str]:
        """The texts of the new events."""
        return self.see(look(*workers, counts=more.pop("counts", None)), **more)

    def see(
        self,
        observation: Observation,
        report: SupervisionReport | None = None,
        files: tuple[tuple[Level, str], ...] = (),
    ) -> list[str]:
        known, self.at = self.log.last, self.at + 1
        self.watch.look(replace(observation, at=self.at), report, files)
        return [one.text for one in self.log.since(known)]


def changed(worker: ObservedWorker, **fields: Any) -> ObservedWorker:
    return replace(worker, record=replace(worker.record, **fields))


ONE, TWO = seen("prefill-0"), seen("decode-0")


def test_the_log_begins_with_what_is_there() -> None:
    (first,) = Watched(ONE, TWO).log.since(0)
    assert (first.number, first.at, first.kind) == (1, 1.0, "health")
    assert first.text == "the log begins: 2 workers, healthy"


def test_workers_come_drain_and_leave() -> None:
    cluster = Watched(ONE)
    assert cluster.look(ONE, TWO) == ["decode-0 joins as a decode worker"]
    assert cluster.look(ONE, changed(TWO, state="draining")) == ["decode-0 drains"]
    assert cluster.look(ONE) == ["decode-0 has left after its drain"]
    assert cluster.look(ONE) == []


def test_a_death_is_an_error() -> None:
    cluster = Watched(ONE, TWO)
    assert cluster.look(ONE) == ["decode-0 is gone without a drain"]
    assert cluster.log.since(1)[0].level == "error"
    born = changed(TWO, incarnation="decode-0:2")
    assert cluster.look(ONE, born) == ["decode-0 joins as a decode worker"]


def test_a_role_changes() -> None:
    cluster = Watched(ONE, TWO)
    cluster.look(ONE, changed(TWO, state="draining"))
    assert cluster.look(ONE, changed(TWO, role="prefill")) == [
        "decode-0 is a prefill worker now",
        "decode-0 takes requests again",
    ]


def test_a_worker_that_does_not_answer() -> None:
    """For longer than a moment, and not before it has ever answered."""
    cluster = Watched(ONE, TWO)
    down = replace(TWO, is_up=False)
    new = seen("decode-1", is_up=False)
    assert cluster.look(ONE, down) == []
    assert cluster.look(ONE, TWO) == []
    assert cluster.look(ONE, down, new) == ["decode-1 joins as a decode worker"]
    assert cluster.look(ONE, down, new) == ["decode-0 takes no requests: it does not answer"]
    assert cluster.look(ONE, down, new) == []
    assert cluster.look(ONE, TWO, new) == ["decode-0 answers again"]


def test_many_workers_are_one_event() -> None:
    many = [seen(f"decode-{number}") for number in range(20)]
    cluster = Watched(ONE)
    (text,) = cluster.look(ONE, *many)
    assert text.startswith("20 workers, each joins as a decode worker: decode-0, decode-1, ")
    assert text.endswith(", …")


def test_moves_are_summed_by_cause() -> None:
    failed, drained = ("moved", "decode_failed"), ("moved", "drained")

    def counts(failures: float, drains: float) -> dict[Key, float]:
        return {failed: failures, drained: drains}

    cluster = Watched()
    assert cluster.look(counts=counts(3, 0)) == ["3 requests move: their decode worker failed"]
    assert cluster.look(counts=counts(5, 1)) == ["1 request moves: their worker drains"]
    for _ in range(3):
        assert cluster.look(counts=counts(9, 1)) == []
    assert cluster.look(counts=counts(9, 1)) == ["6 requests move: their decode worker failed"]
    assert cluster.look(counts={("moved", "new_reason"): 2.0}) == ["2 requests move: new_reason"]


def test_breakers_and_keys() -> None:
    cluster = Watched()
    counts: dict[Key, float] = {("left_out", "decode-0"): 1.0, ("key_file_failures",): 3.0}
    assert cluster.look(counts=counts) == [
        "the circuit breaker of decode-0 opens: its streams fail repeatedly",
        "the file of API keys cannot be used: the previous keys stay valid",
    ]
    assert cluster.look(counts=counts) == []
    counts = counts | {("readmitted", "decode-0"): 1.0}
    assert cluster.look(counts=counts) == [
        "the circuit breaker of decode-0 closes: it takes requests as before"
    ]
    assert [one.level for one in cluster.log.since(1)] == ["warning", "error", "info"]


def test_health() -> None:
    cluster = Watched()
    bad = replace(look(), health="degraded", reason="no prefill worker is ready")
    assert cluster.see(bad) == ["the cluster is degraded: no prefill worker is ready"]
    assert cluster.see(bad) == []
    assert cluster.see(replace(look(), health="down", reason="draining")) == [
        "the cluster is down: draining"
    ]
    assert cluster.see(look()) == ["the cluster is healthy"]
    assert [one.level for one in cluster.log.since(1)] == ["warning", "error", "info"]


def report(deaths: int = 0, error: str = "", *texts: str, loop: bool = False) -> SupervisionReport:
    decisions = tuple(ScalingDecision(float(n), text) for n, text in enumerate(texts, 1))
    return SupervisionReport("", {"decode-0": SlotDeaths(deaths, error, loop)}, decisions)


def test_the_supervisor_tells_why_a_worker_died() -> None:
    cluster = Watched()
    assert cluster.look(report=report(2, "old")) == [], "before this router began"
    assert cluster.look(report=report(3, "exit code 1")) == [
        "decode-0 has died (3 times in a row): exit code 1"
    ]
    assert cluster.look(report=None) == []
    assert cluster.look(report=report(0)) == []
    assert cluster.look(report=report(1)) == ["decode-0 has died"]
    assert cluster.look(report=report(2, "killed", loop=True)) == [
        "decode-0 has died (2 times in a row), in a crash loop: killed"
    ]


def test_each_decision_of_the_autoscaler_is_one_event() -> None:
    cluster = Watched()
    assert cluster.look(report=report(0, "", "first", "second")) == ["first", "second"]
    assert cluster.look(report=report(0, "", "first", "second", "third")) == ["third"]
    assert [one.at for one in cluster.log.since(1)] == [1.0, 2.0, 3.0]


def test_the_log_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "KEPT", 3)
    log = EventLog()
    for number in range(5):
        log.add(float(number), "role", f"event {number}")
    assert [one.number for one in log.since(0)] == [3, 4, 5]
    assert [one.number for one in log.since(4)] == [5]


def test_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("router-x")
    assert files.certificate is not None
    watch = CertificateWatch([files])
    assert watch.look() == []
    good = files.certificate.read_bytes()
    files.certificate.write_text("no certificate")
    ((level, text),) = watch.look()
    assert level == "error"
    assert text.startswith("the previous certificate stays in use: TLS with ")
    assert watch.look() == [], "once"
    files.certificate.unlink()
    files.certificate.write_bytes(good)
    assert watch.look() == [("info", f"{files.certificate} was replaced")]
    cluster = Watched()
    assert cluster.look(files=(("error", text),)) == [text]


def test_a_store_that_dies_and_comes_back() -> None:
    cluster = Watched()
    failures: Key = ("redis_failures",)
    assert cluster.look(counts={failures: 2.0}) == [
        "the store does not answer: requests go on, with what the router knows"
    ]
    assert cluster.look(counts={failures: 7.0}) == []
    assert cluster.look(counts={failures: 7.0}) == ["the store answers again: 7 calls have failed"]
    assert cluster.look(counts={failures: 7.0}) == []
