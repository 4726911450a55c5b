"""What a search goes through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import ConfigError
from planning.planner.cluster_kind import AS_MEASURED, TRANSPORTS, Counts
from planning.planner.traffic import whole
from planning.planner.worker_kinds import (
    ASSUMED_PRICES,
    cluster_kinds,
    parse_prices,
    price_of,
    roles,
    transports,
    worker_kinds,
)
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.costs.worker_profile import profile_fields
from tests.support.loadtest.clusters import profile
from tests.support.loadtest.plans import config, trace


def test_degrees_that_do_not_hold_the_model_are_left_out() -> None:
    kinds, dropped = worker_kinds(["h100"], "llama-3.1-70b", (), parse_prices([]))
    assert [kind.gpus for kind in kinds] == [4, 8]
    assert len(dropped) == 2
    assert "leaves no room" in dropped[0]
    assert kinds[0].price_per_hour == pytest.approx(4 * ASSUMED_PRICES["h100"])


def test_nothing_is_left() -> None:
    with pytest.raises(ConfigError, match="no room"):
        worker_kinds(["l40s"], "llama-3.1-70b", (1,), parse_prices([]))
    with pytest.raises(ConfigError, match="no GPU"):
        worker_kinds([], "", (), parse_prices([]))
    with pytest.raises(ConfigError, match="1 to 8"):
        worker_kinds(["h100"], "", (16,), parse_prices([]))


def test_the_smallest_that_keep_the_slos_are_tried() -> None:
    kinds, _ = worker_kinds(["h100"], "", (), parse_prices([]))
    long = [whole(trace(4, prompt=30_000))]
    found = roles(kinds, long, config(ttft_s=1.0), 0.9, every=False)
    assert found.reachable
    assert [kind.gpus for kind in found.decode] == [1, 2]
    assert [kind.gpus for kind in found.prefill] == [2, 4]
    assert any("TTFT of 0.0%" in text for text in found.dropped)
    every = roles(kinds, long, config(ttft_s=1.0), 0.9, every=True)
    assert [kind.gpus for kind in every.prefill] == [2, 4, 8]
    wide = TRANSPORTS["nixl"]
    assert len(cluster_kinds(found, wide)) == 4
    assert {kind.transport for kind in cluster_kinds(found, wide)} == {wide}


def test_the_nearest_stand_for_those_that_do_not_exist() -> None:
    kinds, _ = worker_kinds(["h100"], "", (1, 2), parse_prices([]))
    found = roles(kinds, [whole(trace(4, prompt=30_000))], config(ttft_s=0.001), 0.9, every=True)
    assert not found.reachable
    assert len(found.prefill) == 1


def test_a_measured_profile_keeps_its_wire(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(profile_fields(profile())))
    kinds, _ = worker_kinds([str(path)], "", (), parse_prices([f"{path}=0.1"]))
    assert [kind.gpus for kind in kinds] == [1]
    found = roles(kinds, [whole(trace())], config(), 0.9, every=False)
    (kind,) = cluster_kinds(found, TRANSPORTS["nixl"])
    assert kind.transport is AS_MEASURED
    shape = kind.shape(Counts(1, 1))
    assert shape.decode_profile.wire_bytes_per_s == profile().wire_bytes_per_s


def test_transports_by_name() -> None:
    assert [one.name for one in transports(["cuda_ipc", "grpc"])] == ["grpc", "cuda_ipc"]
    with pytest.raises(ConfigError, match="shm"):
        transports(["grpc", "shm"])
    with pytest.raises(ConfigError, match="known"):
        transports([])


def test_every_accelerator_has_one() -> None:
    assert set(ASSUMED_PRICES) == set(ACCELERATORS)


def test_ones_own_go_before() -> None:
    prices = parse_prices(["h200=3.25, a100=1", "0.5"])
    assert price_of(prices, "h200") == 3.25
    assert price_of(prices, "a100") == 1.0
    assert price_of(prices, "b200") == ASSUMED_PRICES["b200"]
    assert price_of(prices, "cpu.json") == 0.5


@pytest.mark.parametrize("text", ["h200=", "h200=-1", "h200=nan", "h200", ""])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a price"):
        parse_prices([text])


def test_the_cost_of_a_profile_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match=r"--price cpu\.json"):
        price_of(parse_prices([]), "cpu.json")
