"""How the worker of several ranks learns that one has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray import exceptions

from deploy.workers.ranks import _watch


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception | None]:
    """What Ray reports of ranks, in this order."""
    reported: dict[str, Exception | None] = {}

    def wait(left: Sequence[str], num_returns: int) -> tuple[list[str], list[str]]:
        return list(left[:num_returns]), list(left[num_returns:])

    def get(reference: str) -> None:
        error = reported[reference]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return reported


def watched(ends: dict[str, Exception | None]) -> list[str]:
    told: list[str] = []
    references: dict[Any, int] = {name: rank for rank, name in enumerate(ends, 1)}
    _watch(references, told.append)
    return told


def test_a_rank_that_dies_or_says_why_it_fails_is_reported(
    ends: dict[str, Exception | None],
) -> None:
    for error in (exceptions.ActorDiedError(), None):
        ends.clear()
        ends["first"] = error
        (told,) = watched(ends)
        assert told.startswith("rank 1: ")


def test_an_error_of_ray_itself_ends_no_rank(ends: dict[str, Exception | None]) -> None:
    """The connections between the ranks show which of them is lost."""
    ends["first"] = exceptions.ActorUnavailableError("try again", None)
    ends["second"] = RuntimeError("the driver is not connected")
    assert watched(ends) == []
    ends["third"] = exceptions.ActorDiedError()
    (told,) = watched(ends)
    assert told.startswith("rank 3: ")
