"""Workers as a table lists them, for the tests of policies."""

from __future__ import annotations

from baton.request import Geometry, LoadSnapshot
from baton.store.registry import WorkerRecord
from router.routing.cost_model import Coefficients
from router.routing.worker_table import WorkerTable

BLOCK = 16
PREFILL_COST: Coefficients = (5.0, 0.5, 0.0001)
STEP_COST: Coefficients = (8.0, 1.0, 0.001)


def record(
    slot: str,
    *,
    block_size: int = BLOCK,
    max_sequences: int = 64,
    prefill_cost: Coefficients = PREFILL_COST,
    step_cost: Coefficients = STEP_COST,
    pool: str = "",
    host: str = "127.0.0.1",
    shares_cores: bool = False,
    gpu: str = "",
    fingerprint: str = "",
) -> WorkerRecord:
    """Of the role that the slot's name begins with."""
    return WorkerRecord(
        incarnation=slot,
        slot=slot,
        role="prefill" if slot.startswith("p") else "decode",
        address=f"{host}:1",
        metrics_address="",
        model="tiny",
        fingerprint=fingerprint,
        geometry=Geometry(block_size, 2, 3, 64, "bfloat16"),
        context_length=8192,
        total_blocks=4000,
        max_sequences=max_sequences,
        pool=pool,
        prefill_cost=prefill_cost,
        step_cost=step_cost,
        shares_cores=shares_cores,
        gpu=gpu,
    )


def list_worker(
    table: WorkerTable,
    listed: WorkerRecord,
    load: LoadSnapshot | None = None,
    *,
    now_ms: float = 0.0,
) -> None:
    """List a worker that is up; without ``load`` it has room and nothing to do."""
    table.add(listed)
    load = LoadSnapshot(free_blocks=listed.total_blocks) if load is None else load
    table.set_load(listed.incarnation, load, now_ms)
    table.set_up(listed.incarnation, True)


def table_of(*slots: str) -> WorkerTable:
    """Idle workers that are up."""
    table = WorkerTable(BLOCK)
    for slot in slots:
        list_worker(table, record(slot))
    return table
