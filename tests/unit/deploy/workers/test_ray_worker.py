"""What the errors of Ray say about a worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import exceptions

from baton.errors import WorkerFailed
from deploy.workers import ray_worker
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import RayWorker, place


def worker(error: Exception) -> RayWorker:
    """A worker whose call of ``ready`` gives this error."""
    outcome: Any = asyncio.get_running_loop().create_future()
    outcome.set_exception(error)
    reference = SimpleNamespace(future=lambda: outcome)
    return RayWorker("decode-0", SimpleNamespace(ready=SimpleNamespace(remote=lambda: reference)))


@pytest.mark.parametrize(
    "error",
    [
        exceptions.RayTaskError("ready", "Traceback\nno such model", ValueError("no")),  # type: ignore[no-untyped-call]
        exceptions.ActorDiedError(),
    ],
)
async def test_a_worker_that_says_why_or_has_died_has_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(asyncio, "wrap_future", lambda future: future)
    with pytest.raises(WorkerFailed, match="worker decode-0: "):
        await worker(error).ready()


@pytest.mark.parametrize(
    "error",
    [
        exceptions.RaySystemError("the control store does not answer"),  # type: ignore[no-untyped-call]
        exceptions.ActorUnavailableError("try again", None),
        exceptions.GetTimeoutError(),
        exceptions.ObjectFetchTimedOutError("id", None, "stack"),
        RuntimeError("the driver is not connected"),
    ],
)
async def test_an_error_of_ray_itself_is_no_failure_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The supervisor would kill a worker that serves."""
    monkeypatch.setattr(asyncio, "wrap_future", lambda future: future)
    with pytest.raises(type(error)):
        await worker(error).ready()


def test_the_ranks_of_a_worker_that_runs_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has asked for another worker in its slot had an old view of Ray."""
    removed: list[str] = []
    monkeypatch.setattr(ray_worker, "is_known", lambda slot: slot == "decode-0")
    monkeypatch.setattr(ray_worker, "remove_places", removed.append)
    pool = SimpleNamespace(ranks=2, resources={})
    settings = SimpleNamespace(slot="decode-0", own_pool=lambda: pool)
    with pytest.raises(ValueError, match="a worker runs in decode-0"):
        place(cast(ActorSettings, settings))
    assert removed == []
