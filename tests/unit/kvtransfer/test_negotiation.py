"""Choosing a transport, and judging geometries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry
from kvtransfer.negotiation import TRANSPORTS, Fit, check_geometry, choose_transport

GEOMETRY = Geometry(16, 2, 4, 64, "bfloat16", 2)


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(TRANSPORTS, 2)))
def test_the_better_one_is_taken_in_whatever_order_they_are_listed(better: str, worse: str) -> None:
    assert choose_transport([worse, better], [better, worse]) == better
    assert choose_transport([better, worse], [worse]) == worse


def test_the_order_is_documented() -> None:
    assert TRANSPORTS == ("cuda_ipc", "shm", "nixl", "nccl", "grpc", "gloo")


def test_a_forced_one_is_taken_though_there_is_a_better() -> None:
    assert choose_transport(["shm", "grpc"], ["grpc", "shm"], "grpc") == "grpc"


def test_none_in_common_names_both_lists() -> None:
    with pytest.raises(HandoffError, match=r"peer has grpc, shm; here is gloo, nixl"):
        choose_transport(["shm", "grpc"], ["nixl", "gloo"])
    with pytest.raises(HandoffError, match=r"peer has none; here is grpc"):
        choose_transport([], ["grpc"])


@pytest.mark.parametrize(
    ("offered", "supported"), [(["shm"], ["shm", "grpc"]), (["shm", "grpc"], ["shm"])]
)
def test_a_forced_one_that_a_side_lacks_is_not_replaced(
    offered: list[str], supported: list[str]
) -> None:
    with pytest.raises(HandoffError, match=r"'grpc' is forced.*peer has .*shm.*here is .*shm"):
        choose_transport(offered, supported, "grpc")


def test_an_unknown_transport_is_never_chosen_by_itself() -> None:
    with pytest.raises(HandoffError):
        choose_transport(["pigeon"], ["pigeon"])


def test_equal_geometries() -> None:
    assert check_geometry(GEOMETRY, replace(GEOMETRY)) is Fit.EQUAL


@pytest.mark.parametrize(
    "change", [{"block_size": 24}, {"tensor_parallel": 8}, {"kv_dtype": "int8"}]
)
def test_geometries_that_can_be_converted(change: dict[str, object]) -> None:
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    assert check_geometry(GEOMETRY, other) is Fit.CONVERTIBLE
    assert check_geometry(other, GEOMETRY) is Fit.CONVERTIBLE


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"kv_heads": 8},
        {"head_dim": 32},
        {"tensor_parallel": 3},
        {"kv_dtype": "int3"},
        {"block_size": 0},
    ],
)
def test_geometries_that_do_not_fit_are_named(change: dict[str, object]) -> None:
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    for source, target in ((GEOMETRY, other), (other, GEOMETRY)):
        with pytest.raises(GeometryMismatch) as found:
            check_geometry(source, target)
        assert f"the source has {source}" in found.value.message
        assert f"the target has {target}" in found.value.message
