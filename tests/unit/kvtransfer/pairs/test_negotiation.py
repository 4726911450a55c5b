"""Choosing a transport, and judging geometries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry, GroupShape
from kvtransfer.pairs.negotiation import TRANSPORTS, Fit, check_geometry, rank_transports

GEOMETRY = Geometry(16, 2, 4, 64, "bfloat16")


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(TRANSPORTS, 2)))
def test_the_better_one_comes_first_in_whatever_order_they_are_listed(
    better: str, worse: str
) -> None:
    assert rank_transports([worse, better], [better, worse]) == (better, worse)
    assert rank_transports([better, worse], [worse, better]) == (better, worse)
    assert rank_transports([better, worse], [worse]) == (worse,)
    assert rank_transports([worse], [better, worse]) == (worse,)


def test_the_order_is_documented() -> None:
    assert TRANSPORTS == ("cuda_ipc", "shm", "nixl", "nccl", "grpc", "gloo")


def test_all_that_both_have_are_ranked() -> None:
    assert rank_transports(TRANSPORTS[::-1], set(TRANSPORTS)) == TRANSPORTS


def test_a_forced_one_is_the_only_one_that_its_side_lists() -> None:
    """And nothing replaces it where the other side lacks it."""
    assert rank_transports(["shm", "grpc"], ["grpc"]) == ("grpc",)
    with pytest.raises(HandoffError, match=r"peer has shm; this worker has grpc"):
        rank_transports(["shm"], ["grpc"])


def test_none_in_common_names_both_lists() -> None:
    with pytest.raises(HandoffError, match=r"peer has grpc, shm; this worker has gloo, nixl"):
        rank_transports(["shm", "grpc"], ["nixl", "gloo"])
    with pytest.raises(HandoffError, match=r"peer has none; this worker has grpc"):
        rank_transports([], ["grpc"])


def test_an_unknown_transport_is_never_chosen() -> None:
    assert rank_transports(["pigeon", "grpc"], ["grpc", "pigeon"]) == ("grpc",)
    with pytest.raises(HandoffError):
        rank_transports(["pigeon"], ["pigeon"])


def test_equal_geometries() -> None:
    assert check_geometry(GEOMETRY, replace(GEOMETRY)) is Fit.EQUAL


@pytest.mark.parametrize("change", [{"block_size": 24}, {"kv_dtype": "int8"}])
def test_geometries_that_can_be_converted(change: dict[str, object]) -> None:
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    assert check_geometry(GEOMETRY, other) is Fit.CONVERTIBLE
    assert check_geometry(other, GEOMETRY) is Fit.CONVERTIBLE


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_geometries_whose_ranks_share_heads_otherwise(ranks: int) -> None:
    other = replace(GEOMETRY, tensor_parallel=ranks)
    assert check_geometry(GEOMETRY, other) is Fit.SHARED
    assert check_geometry(other, GEOMETRY) is Fit.SHARED
    assert check_geometry(other, replace(other)) is Fit.EQUAL
    drafting = replace(GEOMETRY, drafter=GroupShape(1, 2, 8))
    with pytest.raises(GeometryMismatch, match="switch the draft model off"):
        check_geometry(drafting, replace(drafting, tensor_parallel=ranks))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"kv_heads": 8},
        {"head_dim": 32},
        {"tensor_parallel": 0},
        {"tensor_parallel": 2, "block_size": 24},
        {"tensor_parallel": 2, "kv_dtype": "int8"},
        {"kv_dtype": "int3"},
        {"block_size": 0},
        {"drafter": GroupShape(1, 2, 8)},
        {"drafter": GroupShape(0, 2, 8)},
    ],
)
def test_geometries_that_do_not_fit_are_named(change: dict[str, object]) -> None:
    other = replace(GEOMETRY, **change)  # type: ignore[arg-type]
    for source, target in ((GEOMETRY, other), (other, GEOMETRY)):
        with pytest.raises(GeometryMismatch) as found:
            check_geometry(source, target)
        assert f"the source has {source}" in found.value.message
        assert f"the target has {target}" in found.value.message


def test_drafters_parts_are_converted_with_the_models() -> None:
    drafting = replace(GEOMETRY, drafter=GroupShape(1, 2, 8))
    other = replace(drafting, block_size=24, kv_dtype="fp8")
    assert check_geometry(drafting, replace(drafting)) is Fit.EQUAL
    assert check_geometry(drafting, other) is Fit.CONVERTIBLE
    for change in (GroupShape(2, 2, 8), GroupShape(1, 4, 8), GroupShape(1, 2, 16)):
        with pytest.raises(GeometryMismatch, match="KV blocks do not fit"):
            check_geometry(drafting, replace(other, drafter=change))
