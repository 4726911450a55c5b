"""Looks at a cluster of two workers, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.config.cluster import Config
from baton.request import Geometry, LoadSnapshot
from baton.store.registry import WorkerRecord
from router.console.rates import Key
from router.console.snapshot import Observation, ObservedWorker
from router.console.worker_page import WorkerPage

CONFIG = Config()


def record(slot: str = "decode-0", **changes: Any) -> WorkerRecord:
    role = slot.split("-", maxsplit=1)[0]
    return replace(
        WorkerRecord(
            incarnation=f"{slot}:1",
            slot=slot,
            role=role,
            address="127.0.0.1:1",
            metrics_address="127.0.0.1:2",
            model="tiny",
            fingerprint="f",
            geometry=Geometry(16, 4, 2, 64, "bfloat16"),
            context_length=2048,
            total_blocks=1000,
            max_sequences=8,
            pool=role,
            prefill_cost=(2.0, 0.1, 0.0),
            step_cost=(5.0, 0.5, 0.0),
        ),
        **changes,
    )


def seen(slot: str = "decode-0", *, is_up: bool = True, **load: Any) -> ObservedWorker:
    return ObservedWorker(record(slot), LoadSnapshot(**load), is_up)


def look(
    *workers: ObservedWorker,
    pages: dict[str, WorkerPage] | None = None,
    counts: dict[Key, float] | None = None,
    gauges: dict[Key, float] | None = None,
) -> Observation:
    return Observation(
        at=1.0,
        model="tiny",
        health="ok",
        reason="",
        workers=workers or (seen("prefill-0"), seen()),
        pages=pages or {},
        counts=counts or {},
        gauges=gauges or {},
        what_if=True,
        chat=True,
    )
