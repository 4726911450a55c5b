"""What the errors of Ray say about a worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import exceptions

from baton.errors import WorkerFailed
from deploy.workers import ray_worker
from deploy.workers.actor_end import ActorEnd, EndKind
from deploy.workers.actor_process import actor_end
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import RayWorker, place
from tests.support.private_names import find


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
        exceptions.OutOfMemoryError("Ray has ended it"),  # type: ignore[no-untyped-call]
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


def died(message: str, **fields: Any) -> exceptions.ActorDiedError:
    context: Any = find("ray.core.generated.common_pb2.ActorDiedErrorContext")
    return exceptions.ActorDiedError(
        context(error_message=message, pid=7, name="decode-0", actor_id=b"a" * 16, **fields)
    )


ADVICE = (
    " Some common causes include: (1) the process was killed by the OOM killer due to high memory "
    "usage, (2) ray stop --force was called"
)
MONITOR = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "127.0.0.1, ID: daab) was 6.42GB used / 23.54GB limit (0.272525)\nOOM kill reason: …\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n8768\t0.71\tprogram --password secret"
)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            died(
                "The actor is dead because its worker process has died. Worker exit type: "
                "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection "
                f"error code 2. End of file.{ADVICE}"
            ),
            ActorEnd(EndKind.PROCESS, "its process has ended without a message to Ray"),
        ),
        (
            died("The actor is dead because it was killed by `ray.kill`."),
            ActorEnd(EndKind.PROCESS, "The actor is dead because it was killed by `ray.kill`."),
        ),
        (
            died(
                "The actor died because its node has died. Node Id: ab\n\tthe actor's node was "
                "terminated unexpectedly: health check failed"
            ),
            ActorEnd(
                EndKind.NODE_LOST,
                "its node is lost: the actor's node was terminated unexpectedly: health check "
                "failed",
            ),
        ),
        (
            exceptions.OutOfMemoryError(MONITOR),  # type: ignore[no-untyped-call]
            ActorEnd(
                EndKind.MEMORY_MONITOR,
                "killed by Ray's memory monitor: all programs of its node used too much (6.42GB "
                "used / 23.54GB limit)",
            ),
        ),
        (WorkerFailed("no such model"), ActorEnd(EndKind.REPORTED, "no such model")),
    ],
)
def test_what_rays_error_says_about_an_end(error: Exception, end: ActorEnd) -> None:
    assert actor_end(error) == end


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
