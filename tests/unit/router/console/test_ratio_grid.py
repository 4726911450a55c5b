"""Which cells there are, whether the simulator describes the cluster, and what is recommended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.request import LoadSnapshot
from router.console.ratio_grid import (
    MAX_DIFFERENCE,
    Advice,
    Check,
    Grid,
    advice_of,
    checks_of,
    commands,
    grid_of,
    shapes_of,
)
from router.console.what_if import Percentile, Shape, ShapeAnswer
from router.core.recent_requests import RecentRequest
from tests.support.router.looks import record

CONFIG = Config()


def grid(prefill: int, decode: int, config: Config = CONFIG) -> Grid:
    requests = [RecentRequest(float(n), 50, 10, 0) for n in range(21)]
    return grid_of(Shape(prefill=prefill, decode=decode), requests, config, share=1.0)


def cell(
    prefill: int, decode: int, good_share: float = 1.0, p95: float | None = 0.5
) -> ShapeAnswer:
    return ShapeAnswer(
        prefill=prefill,
        decode=decode,
        ttft_s=Percentile(p50=p95, p95=p95),
        tpot_s=Percentile(p50=p95, p95=p95),
        e2el_s=Percentile(p50=p95, p95=p95),
        good_share=good_share,
        shed_share=0.0,
        prefill_busy=None,
        decode_busy=0.5,
    )


def test_a_grid_is_around_the_present_workers() -> None:
    found = grid(3, 4)
    assert (found.prefill, found.decode) == ((1, 2, 3, 4, 5), (2, 3, 4, 5, 6))
    assert (found.requests, found.seconds, found.autoscales) == (21, 20.0, False)
    shapes = shapes_of(found)
    assert len(set(shapes)) == 25
    assert shapes[0] == Shape(prefill=3, decode=4)
    assert {(one.prefill, one.decode) for one in shapes[1:5]} == {(2, 4), (4, 4), (3, 3), (3, 5)}


def test_a_grid_ends_at_the_least_and_at_the_most_workers() -> None:
    assert grid(0, 1).prefill == (0, 1, 2)
    assert grid(0, 1).decode == (1, 2, 3)
    assert grid(1, 1024).decode == (1022, 1023, 1024)
    assert grid(1, 1, Config(local_prefill="never")).prefill == (1, 2, 3)
    assert grid(0, 1, Config(local_prefill="never")).prefill == (0, 1, 2), "the present one stays"


def test_a_part_of_the_requests_lasts_shorter() -> None:
    requests = [RecentRequest(float(n), 50, 10, 0) for n in range(21)]
    half = grid_of(Shape(prefill=1, decode=1), requests, CONFIG, share=0.5)
    assert half.seconds == 10.0


def measured(p95: float, good: int = 10) -> list[RecentRequest]:
    return [RecentRequest(float(n), 50, 10, 0, p95, p95, n < good) for n in range(10)]


@pytest.mark.parametrize(
    ("live", "agrees"), [(0.5, True), (0.4, True), (0.38, False), (0.7, True), (0.8, False)]
)
def test_figures_agree_within_the_limit(live: float, *, agrees: bool) -> None:
    ttft, tpot, good = checks_of(cell(1, 1, p95=0.5), measured(live))
    assert (ttft.agrees, tpot.agrees, good.agrees) == (agrees, agrees, True)
    assert ttft.ratio == pytest.approx(0.5 / live)
    assert (abs(0.5 / live - 1) <= MAX_DIFFERENCE) == agrees


def test_goodput_is_compared() -> None:
    *_, good = checks_of(cell(1, 1, good_share=1.0), measured(0.5, good=5))
    assert (good.simulated, good.measured, good.ratio, good.agrees) == (1.0, 0.5, 2.0, False)
    *_, none = checks_of(cell(1, 1, good_share=0.0), measured(0.5, good=0))
    assert (none.ratio, none.agrees) == (None, True)
    *_, some = checks_of(cell(1, 1, good_share=0.5), measured(0.5, good=0))
    assert (some.ratio, some.agrees) == (None, False)


def test_a_percentile_is_interpolated() -> None:
    requests = [RecentRequest(0.0, 50, 10, 0, float(n), None, True) for n in range(11)]
    ttft, tpot, _ = checks_of(cell(1, 1, p95=None), requests)
    assert ttft.measured == pytest.approx(9.5)
    assert not ttft.agrees, "the simulator has no value"
    assert tpot.agrees, "neither has a value"


GOOD = (Check(figure="ttft_p95", simulated=1, measured=1, ratio=1, agrees=True),)
BAD = (Check(figure="ttft_p95", simulated=2, measured=1, ratio=2, agrees=False),)
WORKERS = [record("prefill-0"), record("prefill-1"), record("decode-0"), record("decode-1")]


def advice(*cells: ShapeAnswer, checks: tuple[Check, ...] = GOOD) -> Advice:
    return advice_of(grid(2, 2), cells, checks, WORKERS, CONFIG)


def test_the_best_cell_has_the_fewest_workers_of_those_with_the_most_good_requests() -> None:
    found = advice(cell(2, 2, 0.8), cell(3, 3, 0.999), cell(1, 3, 0.995), cell(1, 1, 0.5))
    assert found.best is not None
    assert found.best.shape == Shape(prefill=1, decode=3)
    assert found.best == found.best_same
    assert not found.is_complete
    more = advice(cell(2, 2, 0.8), cell(3, 3, 1.0), cell(1, 3, 0.9))
    assert more.best is not None
    assert more.best.shape == Shape(prefill=3, decode=3)
    assert more.best_same is not None
    assert more.best_same.shape == Shape(prefill=1, decode=3)


def test_the_present_workers_stay_unless_others_are_better() -> None:
    found = advice(cell(2, 2, 0.99, p95=0.5), cell(1, 3, 0.995, p95=0.1))
    assert found.best is not None
    assert (found.best.shape, found.best.commands) == (Shape(prefill=2, decode=2), ())


def test_no_advice_where_the_simulator_is_wrong() -> None:
    found = advice(cell(2, 2), cell(1, 3), checks=GOOD + BAD)
    assert (found.best, found.best_same) == (None, None)
    assert advice().best is None


def to(prefill: int, decode: int, config: Config = CONFIG) -> tuple[str, ...]:
    return commands(
        Shape(prefill=2, decode=2), Shape(prefill=prefill, decode=decode), WORKERS, config
    )


def test_commands() -> None:
    assert to(2, 2) == ()
    assert to(1, 3) == ("baton role prefill-0 decode",)
    assert to(3, 1) == ("baton role decode-0 prefill",)
    assert to(3, 2) == ("baton scale prefill 3",)
    assert to(1, 1) == ("baton scale prefill 1", "baton scale decode 1")
    assert to(1, 4) == ("baton role prefill-0 decode", "baton scale decode 3")


def test_pools_that_something_else_places_are_scaled_by_its_command() -> None:
    config = Config(scale_command="kubectl scale deployment/{pool} --replicas={count}")
    pods = [replace(one, slot=f"pod-{one.slot}-x7f") for one in WORKERS]
    here, wanted = Shape(prefill=2, decode=2), Shape(prefill=1, decode=4)
    assert commands(here, wanted, pods, config) == (
        "baton role pod-prefill-0-x7f decode",
        "kubectl scale deployment/decode --replicas=3",
    )


def test_a_worker_of_the_other_pool_returns_first_then_the_idle_one() -> None:
    here = Shape(prefill=3, decode=1)
    guest = replace(record("decode-1"), role="prefill")
    busy = replace(record("prefill-0"), load=LoadSnapshot(running=3))
    workers = [busy, record("prefill-1"), record("decode-0"), guest]
    assert commands(here, Shape(prefill=2, decode=2), workers, CONFIG) == (
        "baton role decode-1 decode",
    )
    assert commands(here, Shape(prefill=1, decode=3), workers, CONFIG) == (
        "baton role decode-1 decode",
        "baton role prefill-1 decode",
    )
    # The highest slot of the decode pool has a prefill worker: the pool's end is that one.
    assert commands(here, Shape(prefill=2, decode=1), workers, CONFIG) == ("baton scale prefill 1",)


def test_what_no_command_can_do_is_said() -> None:
    pools = (PoolConfig(name="decode", role="decode"),)
    assert commands(
        Shape(prefill=0, decode=1),
        Shape(prefill=1, decode=1),
        [record("decode-0")],
        Config(pools=pools),
    ) == ("# 1 more: the configuration has no pool of prefill workers",)
    turned = replace(record("decode-0"), role="prefill")
    stuck = [turned, record("decode-1"), record("decode-2")]
    assert commands(Shape(prefill=1, decode=2), Shape(prefill=0, decode=2), stuck, CONFIG) == (
        "# one prefill worker less: drain it by hand",
    )
