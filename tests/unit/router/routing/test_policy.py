"""What of the configuration reaches the policies, and what all of them do."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.choices import LocalPrefill, PolicyName
from baton.config.cluster import Config
from baton.config.pools import ContextClass, PoolConfig
from baton.errors import Unavailable
from baton.request import LoadSnapshot
from router.routing.cost_model import TransferCosts
from router.routing.policies import make_policy
from router.routing.policy import ClassRoute, Decision, RouteRequest, RouteSettings, route_settings
from router.routing.worker_table import PoolFilter, WorkerTable
from tests.support.router.workers import list_worker, record, table_of

NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


def decide(
    name: PolicyName,
    table: WorkerTable,
    request: RouteRequest,
    held: dict[str, int] | None = None,
    route: ClassRoute | None = None,
) -> Decision:
    routes = RouteSettings(default=route or ClassRoute())
    return make_policy(name, routes, 1).decide(request, table, TransferCosts(), held or {}, 0.0)


def test_classes_own_pools_and_say_where_prompts_are_computed() -> None:
    config = Config(
        pools=(
            PoolConfig(name="p", role="prefill"),
            PoolConfig(name="big", role="prefill"),
            PoolConfig(name="d", role="decode"),
        ),
        classes=(
            ContextClass(name="short", max_tokens=10),
            ContextClass(name="long", pools=("big",), local_prefill="never"),
        ),
        local_prefill="always",
        slo_ttft_s=3.0,
        slo_tpot_s=0.05,
    )
    routes = route_settings(config)
    short, long = (routes.of(RouteRequest(8, name)) for name in ("short", "long"))
    assert (short.local_prefill, long.local_prefill) == ("always", "never")
    assert short.prefill == PoolFilter(None, frozenset({"big"}))
    assert long.prefill == PoolFilter(frozenset({"big"}))
    assert long.decode.allows("d")
    assert (short.slo_ttft_ms, short.slo_tpot_ms) == (3000.0, 50.0)


@pytest.mark.parametrize("name", NAMES)
def test_class_pools_are_respected(name: PolicyName) -> None:
    table = table_of("d-0", "d-1")
    for slot, pool in (("p-0", "p"), ("p-1", "p"), ("pbig-0", "big")):
        list_worker(table, record(slot, pool=pool))
    own = ClassRoute(prefill=PoolFilter(frozenset({"big"})))
    others = ClassRoute(prefill=PoolFilter(None, frozenset({"big"})))
    request = RouteRequest(100, session="s")
    held = {"p-0": 6}
    assert decide(name, table, request, held, own).prefill == "pbig-0"
    for _ in range(4):
        assert decide(name, table, request, {"pbig-0": 6}, others).prefill in {"p-0", "p-1"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("slots", "local", "missing"),
    [
        (("d-0",), "never", "prefill"),
        (("p-0",), "never", "decode"),
        (("p-0",), "auto", "decode"),
        ((), "always", "decode"),
    ],
)
def test_a_role_without_workers_is_named(
    name: PolicyName, slots: tuple[str, ...], local: LocalPrefill, missing: str
) -> None:
    with pytest.raises(Unavailable, match=f"no {missing} worker is ready") as caught:
        decide(name, table_of(*slots), RouteRequest(10), route=ClassRoute(local))
    assert caught.value.retry_after


@pytest.mark.parametrize("name", NAMES)
def test_without_prefill_workers_decode_workers_compute(name: PolicyName) -> None:
    decision = decide(name, table_of("d-0"), RouteRequest(10), route=ClassRoute("auto"))
    assert (decision.prefill, decision.decode, decision.local) == ("d-0", "d-0", True)


@pytest.mark.parametrize("name", NAMES)
def test_always_and_never(name: PolicyName) -> None:
    table = table_of("p-0", "d-0")
    assert decide(name, table, RouteRequest(3000), route=ClassRoute("always")).local
    assert not decide(name, table, RouteRequest(1), route=ClassRoute("never")).local


WORKERS = st.lists(
    st.tuples(
        st.sampled_from(("p", "d")),
        st.integers(0, 60),
        st.integers(0, 2000),
        st.integers(0, 20),
        st.integers(0, 3000),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(get_args(LocalPrefill)),
    WORKERS,
    st.integers(1, 3000),
    st.sampled_from((5.0, 500.0, float("inf"))),
)
def test_every_policy_decides_for_a_worker_of_the_role(
    name: PolicyName,
    local: LocalPrefill,
    workers: list[tuple[str, int, int, int, int]],
    tokens: int,
    deadline_ms: float,
) -> None:
    table, held = table_of("p-first", "d-first"), {}
    for number, (role, depth, waiting, running, free) in enumerate(workers):
        load = LoadSnapshot(
            running=running,
            waiting=waiting // 100,
            waiting_tokens=waiting,
            free_blocks=free,
            context_tokens=100 * running,
        )
        list_worker(table, record(f"{role}-{number}", max_sequences=16), load)
        held[f"{role}-{number}"] = depth
    request = RouteRequest(tokens, deadline_ms=deadline_ms)
    decision = decide(name, table, request, held, ClassRoute(local))
    assert decision.decode.startswith("d")
    assert decision.prefill.startswith("d" if decision.local else "p")
    assert not decision.local or decision.prefill == decision.decode
    assert decision.local or local != "always"
    assert not decision.local or local != "never"
    assert 1 <= decision.uncached_tokens <= tokens
    assert 0 <= decision.queue_ms + decision.prefill_ms <= decision.ttft_ms + 1e-6
    assert decision.tpot_ms > 0
    assert decision.shed == (name == "predictive" and decision.ttft_ms > deadline_ms)
    if decision.holder:
        own = min(held.get(decision.prefill, 0), (tokens - 1) // 16)
        assert held[decision.holder] >= decision.holder_blocks > own
        assert decision.holder_blocks <= (tokens - 1) // 16


@pytest.mark.parametrize("name", NAMES)
def test_excluded_workers_are_not_chosen(name: PolicyName) -> None:
    """A worker under which the request has failed, however good it looks."""
    table = table_of("p-0", "p-1", "d-0", "d-1")
    for excluded, expected in (
        ({"p-0", "d-1"}, ("p-1", "d-0")),
        ({"p-1", "d-0"}, ("p-0", "d-1")),
    ):
        request = RouteRequest(100, excluded=frozenset(excluded))
        found = decide(name, table, request, {next(iter(excluded)): 6})
        assert (found.prefill, found.decode) == expected
    with pytest.raises(Unavailable):
        decide(name, table, RouteRequest(100, excluded=frozenset({"d-0", "d-1"})))
    again = decide(name, table, RouteRequest(100))
    assert again.prefill in ("p-0", "p-1"), "others may go there"
