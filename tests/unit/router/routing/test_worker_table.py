"""The table of workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import LoadSnapshot
from router.routing.worker_table import (
    EVERY_POOL,
    HALF_LIFE_MS,
    LoadColumns,
    PoolFilter,
    WorkerTable,
)
from tests.support.router.workers import BLOCK, list_worker, record, table_of


def row(table: WorkerTable, name: str) -> int:
    found = table.row(name)
    assert found is not None
    return found


def queue(table: WorkerTable, name: str, now_ms: float) -> float:
    return float(table.queue_ms(now_ms)[row(table, name)])


def test_groups_are_those_that_are_up_by_role_and_pool() -> None:
    table = table_of("p-0", "p-1", "d-0")
    list_worker(table, record("pp-0", pool="own"))
    assert [table.names[r] for r in table.group("prefill").rows] == ["p-0", "p-1", "pp-0"]
    own, others = PoolFilter(frozenset({"own"})), PoolFilter(None, frozenset({"own"}))
    assert [table.names[r] for r in table.group("prefill", own).rows] == ["pp-0"]
    assert [table.names[r] for r in table.group("prefill", others).rows] == ["p-0", "p-1"]
    table.set_up("p-0", False)
    assert [table.names[r] for r in table.group("prefill", others).rows] == ["p-1"]
    table.remove("p-1")
    assert len(table.group("prefill", others)) == 0
    assert len(table.group("decode")) == 1


def test_a_role_may_change() -> None:
    table = table_of("p-0", "d-0")
    table.add(replace(record("p-0"), role="decode"))
    assert len(table.group("prefill")) == 0
    assert len(table.group("decode")) == 2


def test_a_pool_is_read_from_the_slot_where_the_record_has_none() -> None:
    table = WorkerTable(BLOCK)
    list_worker(table, record("prefill-big-3"))
    assert len(table.group("prefill", PoolFilter(frozenset({"prefill-big"})))) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=80))
def test_rows_are_reused_and_grow_without_mixing_workers_up(steps: list[tuple[int, bool]]) -> None:
    table, alive = WorkerTable(BLOCK), dict[str, int]()
    for number, comes in steps:
        name = f"p-{number}"
        if comes and name not in alive:
            list_worker(table, record(name, max_sequences=number + 1))
            alive[name] = number
            table.promise_sequence(name, number, 0)
        elif not comes:
            table.remove(name)
            alive.pop(name, None)
        assert len(table) == len(alive)
        assert {table.names[r] for r in table.group("prefill").rows} == set(alive)
        for one, known in alive.items():
            assert table.max_sequences[row(table, one)] == known + 1
            assert table.context_tokens[row(table, one)] == known


def test_a_queue_is_what_was_promised_and_is_worked_off() -> None:
    table = table_of("p-0")
    table.promise_prompt("p-0", 100.0, 1000.0)
    table.promise_prompt("p-0", 50.0, 1000.0)
    assert queue(table, "p-0", 1000.0) == 150.0
    assert queue(table, "p-0", 1060.0) == 90.0
    table.prompt_computed("p-0", 100.0, 1080.0)
    assert queue(table, "p-0", 1080.0) == 50.0
    table.prompt_computed("p-0", 50.0, 1130.0)
    assert queue(table, "p-0", 1130.0) == 0.0
    table.prompt_computed("p-0", 50.0, 1130.0)
    assert queue(table, "p-0", 1130.0) == 0.0


def test_a_worker_that_hangs_does_not_look_idle() -> None:
    table = table_of("p-0")
    for _ in range(10):
        table.promise_prompt("p-0", 100.0, 0.0)
    assert queue(table, "p-0", 60_000.0) > 900.0


def test_other_routers_work_counts_once() -> None:
    table = WorkerTable(BLOCK)
    list_worker(table, record("p-0", prefill_cost=(0.0, 1.0, 0.0)))
    table.promise_prompt("p-0", 100.0, 0.0)
    told = LoadSnapshot(waiting=3, waiting_tokens=300, free_blocks=10)
    table.set_load("p-0", told, 0.0)
    assert queue(table, "p-0", 0.0) == pytest.approx(300.0)
    table.set_load("p-0", told, 100.0)
    assert queue(table, "p-0", 100.0) == pytest.approx(110.0), "the same snapshot again"
    table.set_load("p-0", replace(told, waiting=0, waiting_tokens=0), 100.0)
    assert queue(table, "p-0", 100.0) == pytest.approx(10.0)


def test_promises_and_snapshots_of_sequences() -> None:
    table = WorkerTable(BLOCK)
    told = LoadSnapshot(running=2, waiting=1, context_tokens=500, free_blocks=7, cached_blocks=3)
    list_worker(table, record("d-0", block_size=32), told)
    at = row(table, "d-0")
    assert table.available_blocks[at] == 20, "counted in blocks of the index"
    table.promise_sequence("d-0", 900, 6)
    assert (table.sequences[at], table.context_tokens[at]) == (3, 900)
    assert table.available_blocks[at] == 14
    table.sequence_settled("d-0", 6)
    assert table.available_blocks[at] == 20
    table.sequence_ended("d-0", 900)
    assert (table.sequences[at], table.context_tokens[at]) == (3, 500)


def test_work_fades_also_over_days() -> None:
    table = table_of("p-0", "p-1")
    table.promise_prompt("p-0", 100.0, 0.0)
    at = row(table, "p-0")
    assert table.recent_work(HALF_LIFE_MS)[at] == pytest.approx(50.0)
    day = 86_400_000.0
    assert table.recent_work(day)[at] == pytest.approx(0.0)
    table.promise_prompt("p-0", 100.0, day)
    assert table.recent_work(day)[at] == pytest.approx(100.0)
    assert table.recent_work(day + HALF_LIFE_MS)[at] == pytest.approx(50.0)


def test_a_new_worker_does_not_get_all_later_prompts() -> None:
    table = table_of("p-0", "p-1")
    table.promise_prompt("p-0", 300.0, 0.0)
    table.promise_prompt("p-1", 100.0, 0.0)
    list_worker(table, record("p-2"))
    at = row(table, "p-2")
    assert table.recent_work(0.0)[at] == pytest.approx(200.0)
    assert table.placed[at] == 1


@pytest.mark.parametrize(("held", "usable"), [(5, 4), (4, 4), (3, 0)])
def test_only_whole_blocks_of_a_worker_are_of_use(held: int, usable: int) -> None:
    table = WorkerTable(BLOCK)
    list_worker(table, record("p-0", block_size=64))
    list_worker(table, record("p-1"))
    found, rows = table.held_blocks({"p-0": held, "p-1": held, "nobody": 9})
    assert found[row(table, "p-0")] == usable
    assert found[row(table, "p-1")] == held
    assert set(rows) == set(np.flatnonzero(found)) <= {row(table, "p-0"), row(table, "p-1")}


def test_costs_are_learned_from_reports() -> None:
    table = WorkerTable(BLOCK)
    list_worker(table, record("p-0", prefill_cost=(5.0, 0.5, 0.0)))
    at = row(table, "p-0")
    for _ in range(200):
        table.learn_prefill("p-0", 100, 50.0, 200.0)
        table.learn_prefill("p-0", 1000, 500.0, 2000.0)
    assert table.prefill_b[at] == pytest.approx(2.0, rel=0.05)
    for number in range(200):
        batch = 1 + number % 8
        told = LoadSnapshot(step_ms=4.0 * batch, step_batch=batch, step_context_tokens=0.0)
        table.set_load("p-0", told, 1000.0 * number)
    assert table.step_b[at] == pytest.approx(4.0, rel=0.1)


def test_what_is_said_of_strangers_is_ignored() -> None:
    table = table_of("p-0")
    table.promise_prompt("x", 1.0, 0.0)
    table.prompt_computed("x", 1.0, 0.0)
    table.promise_sequence("x", 1, 1)
    table.learn_prefill("x", 1, 1.0, 1.0)
    table.set_load("x", LoadSnapshot(), 0.0)
    table.set_up("x", True)
    table.remove("x")
    assert len(table) == 1
    assert table.row("x") is None


def snapshots() -> st.SearchStrategy[LoadSnapshot]:
    count = st.integers(0, 50)
    return st.builds(
        LoadSnapshot,
        running=count,
        waiting=count,
        waiting_tokens=count,
        free_blocks=count,
        cached_blocks=count,
        context_tokens=count,
        step_ms=st.floats(0.0, 90.0),
        step_batch=st.floats(0.0, 9.0),
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["p-0", "p-1", "d-0", "nobody"]), snapshots()), max_size=6
    )
)
def test_snapshots_together_are_those_one_by_one(rounds: list[dict[str, LoadSnapshot]]) -> None:
    together, single = table_of("p-0", "p-1", "d-0"), table_of("p-0", "p-1", "d-0")
    for number, loads in enumerate(rounds):
        for table in (together, single):
            table.promise_prompt("p-0", 100.0, number * 150.0)
        together.set_loads(LoadColumns.of(loads), number * 150.0)
        for name, load in loads.items():
            single.set_load(name, load, number * 150.0)
    for column in ("sequences", "others_until", "available_blocks", "context_tokens", "step_a"):
        for name in ("p-0", "p-1", "d-0"):
            at = row(together, name)
            assert getattr(together, column)[at] == getattr(single, column)[at]


def test_a_large_table_observes_the_steps_of_each_worker_less_often() -> None:
    def learned(workers: int) -> float:
        table = table_of(*(f"d-{number}" for number in range(workers)))
        table.set_load("d-0", LoadSnapshot(step_ms=50.0, step_batch=1, engine_steps=1), 0.0)
        first = float(table.step_a[row(table, "d-0")])
        table.set_load("d-0", LoadSnapshot(step_ms=90.0, step_batch=1, engine_steps=2), 250.0)
        return float(table.step_a[row(table, "d-0")]) - first

    assert learned(4) > 0
    assert learned(1500) == 0


def test_a_full_table_grows_by_a_quarter() -> None:
    table = table_of(*(f"p-{number}" for number in range(1000)))
    assert 1000 < len(table.names) <= 1251


def test_workers_of_another_fingerprint_are_in_no_group_of_this_one() -> None:
    table = table_of("p-0", "d-0")
    for slot in ("p-1", "d-1"):
        list_worker(table, record(slot, fingerprint="g", gpu="0"))
    assert [table.names[r] for r in table.group("prefill").rows] == ["p-0"]
    assert [table.names[r] for r in table.group("decode", kv_group="g").rows] == ["d-1"]
    assert len(table.prefill_apart(EVERY_POOL, EVERY_POOL)) == 1
    assert len(table.prefill_apart(EVERY_POOL, EVERY_POOL, "g")) == 0, "they share a GPU"
    assert len(table.group("decode", kv_group="h")) == 0
