"""Shared by the tests of demand and by other tests."""

from __future__ import annotations

from baton.request import Geometry, LoadSnapshot
from baton.store.registry import WorkerRecord


def record(role: str = "decode", **load: float) -> WorkerRecord:
    """Prompts cost a millisecond a token; a step 20 ms, 2 for each sequence, 0.01 for a token."""
    return WorkerRecord(
        incarnation=f"{role}-0:1",
        slot=f"{role}-0",
        role=role,
        address="",
        metrics_address="",
        model="",
        fingerprint="",
        geometry=Geometry(16, 1, 1, 1, ""),
        context_length=4096,
        total_blocks=10_000,
        max_sequences=64,
        pool=role,
        prefill_cost=(10.0, 1.0, 0.0),
        step_cost=(20.0, 2.0, 0.01),
        load=LoadSnapshot(**load),  # type: ignore[arg-type]
    )
