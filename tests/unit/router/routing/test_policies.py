"""The policies that judge workers one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.choices import PolicyName
from baton.request import LoadSnapshot
from router.routing.policies import make_policy
from router.routing.policy import Decision, RouteRequest, RouteSettings
from router.routing.routing_state import RoutingState
from router.routing.worker_table import hash_of, scores
from tests.support.router.workers import BLOCK, list_worker, record

SLOTS = ("p-0", "p-1", "p-2", "d-0", "d-1")


def routing(name: PolicyName, *slots: str) -> RoutingState:
    made = RoutingState(make_policy(name, RouteSettings(), 1), BLOCK)
    for slot in slots or SLOTS:
        list_worker(made.table, record(slot))
    return made


def place(
    made: RoutingState,
    held: dict[str, int] | None = None,
    *,
    tokens: int = 100,
    session: str = "",
    now: float = 0.0,
) -> Decision:
    request = RouteRequest(tokens, session=session)
    decision = made.decide(request, (), held or {}, now)
    made.promise(decision, request, (), now)
    return decision


def test_round_robin_takes_every_worker_in_turn() -> None:
    made = routing("round_robin")
    found = [place(made, {"p-0": 6}) for _ in range(6)]
    assert [one.prefill for one in found] == ["p-0", "p-1", "p-2"] * 2
    assert [one.decode for one in found] == ["d-0", "d-1"] * 3
    assert found[0].reason == "round_robin"
    list_worker(made.table, record("p-3"))
    assert {place(made).prefill for _ in range(4)} == {"p-0", "p-1", "p-2", "p-3"}


def test_least_loaded_takes_the_shortest_queue_and_the_emptiest_batch() -> None:
    made = routing("least_loaded")
    made.table.promise_prompt("p-0", 10.0, 0.0)
    made.table.promise_prompt("p-1", 500.0, 0.0)
    made.table.promise_prompt("p-2", 20.0, 0.0)
    busy = LoadSnapshot(running=3, free_blocks=1000)
    made.table.set_load("d-0", busy, 0.0)
    decision = place(made, {"p-1": 6})
    assert (decision.prefill, decision.decode) == ("p-0", "d-1")


def test_prefix_herds() -> None:
    made = routing("prefix")
    made.table.promise_prompt("p-1", 1e6, 0.0)
    assert place(made, {"p-1": 2, "p-0": 1, "d-1": 1}).prefill == "p-1"
    assert place(made).prefill != "p-1", "of equals the least loaded"


def test_power_of_two_spreads_and_avoids_the_busiest() -> None:
    made = routing("power_of_two")
    made.table.promise_prompt("p-0", 1e9, 0.0)
    counts = Counter(place(made, now=float(n)).prefill for n in range(200))
    assert counts["p-0"] == 0
    assert min(counts["p-1"], counts["p-2"]) > 50


def test_a_session_stays_while_workers_come_and_go() -> None:
    made = routing("session")
    names = [f"chat {n}" for n in range(60)]
    before = {name: place(made, session=name) for name in names}
    assert {one.prefill for one in before.values()} == {"p-0", "p-1", "p-2"}
    made.remove("p-1")
    after = {name: place(made, session=name) for name in names}
    for name in names:
        if before[name].prefill != "p-1":
            assert after[name].prefill == before[name].prefill
        assert after[name].decode == before[name].decode
    # The same slot in another life: its sessions come back.
    list_worker(made.table, record("p-1"))
    again = {name: place(made, session=name).prefill for name in names}
    assert again == {name: one.prefill for name, one in before.items()}


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    made = routing("session")
    made.table.promise_prompt("p-0", 10.0, 0.0)
    made.table.promise_prompt("p-1", 10.0, 0.0)
    assert place(made).prefill == "p-2"


def test_room_comes_first_where_sequences_decode() -> None:
    for name in ("round_robin", "least_loaded", "prefix", "power_of_two", "session"):
        made = routing(name)
        made.table.set_load("d-0", LoadSnapshot(free_blocks=2), 0.0)
        made.table.set_load("d-1", LoadSnapshot(running=60, free_blocks=1000), 0.0)
        decisions = {place(made, session=str(n)).decode for n in range(4)}
        assert decisions == {"d-1"}, name


def chosen(workers: list[str], session: str) -> str:
    hashes = np.array([hash_of(name) for name in workers], dtype=np.uint64)
    return workers[int(scores(hashes, hash_of(session)).argmax())]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=12, unique=True),
    st.text(max_size=10),
    st.data(),
)
def test_who_leaves_moves_only_its_own(
    workers: list[str], session: str, data: st.DataObject
) -> None:
    before = chosen(workers, session)
    assert chosen(workers[::-1], session) == before
    gone = data.draw(st.sampled_from(workers))
    after = chosen([name for name in workers if name != gone], session)
    assert before in {after, gone}


def test_sessions_are_spread() -> None:
    workers = [f"prefill-{n}" for n in range(8)]
    counts = dict.fromkeys(workers, 0)
    for session in range(4000):
        counts[chosen(workers, f"session {session}")] += 1
    assert max(counts.values()) < 1.25 * 500
    assert min(counts.values()) > 0.75 * 500
