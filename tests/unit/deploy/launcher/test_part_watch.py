"""How the launcher's children are started again."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from baton.errors import BatonError
from baton.host.background import end_tasks
from deploy.launcher import part_watch
from deploy.launcher.part_watch import PartWatch, SlotWatch
from deploy.supervisor.reconciler import Phase, SlotState
from deploy.supervisor.status_store import SlotStatus, SupervisionStatus
from tests.support.deploy.kernel import knows_exits


class Mayfly:
    """Ends as soon as it is started, if it can be started at all."""

    def __init__(self) -> None:
        self.starts = 0
        self.failure: Exception | None = None

    @property
    def pid(self) -> int:
        return self.starts

    async def start(self) -> None:
        self.starts += 1
        if self.failure is not None:
            raise self.failure

    async def wait(self) -> str:
        return f"end {self.starts}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LONGEST_PAUSE_S", "_AGAIN_S"):
        monkeypatch.setattr(part_watch, name, 0.001)


@pytest.mark.parametrize(
    "failure", [None, PermissionError("not now"), BatonError("no"), KeyError("a bug")]
)
async def test_parts_are_started_again_for_ever_and_that_is_said_twice(
    failure: Exception | None,
) -> None:
    """The rest of the cluster serves meanwhile."""
    lines: list[str] = []
    pids: dict[str, int] = {}
    part = Mayfly()
    part.failure = failure
    watch = PartWatch(lines.append, pids.__setitem__)
    keeping = asyncio.create_task(watch.keep("gcs", part))
    async with asyncio.timeout(60):
        while part.starts < 20:
            await asyncio.sleep(0.001)
    assert not keeping.done()
    first, later = lines
    assert first == "gcs ended (end 0); restarting it until it stays up"
    assert later.startswith("gcs keeps ending, 5 times so far, last by ")
    assert bool(pids) is (failure is None)
    await end_tasks([keeping])


async def test_a_part_whose_end_cannot_be_handled_is_started_again() -> None:
    class Odd(Mayfly):
        async def wait(self) -> str:
            raise OSError("no space for its metrics")

    part = Odd()
    watch = PartWatch(lambda line: None, lambda name, pid: None)
    keeping = asyncio.create_task(watch.keep("router", part))
    async with asyncio.timeout(60):
        while part.starts < 3:
            await asyncio.sleep(0.001)
    assert not keeping.done()
    await end_tasks([keeping])


async def test_what_only_watches_is_done_again_after_an_error() -> None:
    lines: list[str] = []
    tries = 0

    async def look() -> None:
        nonlocal tries
        tries += 1
        raise KeyError("a field of another version")

    looking = asyncio.create_task(PartWatch(lines.append, lambda *_: None).again("the look", look))
    async with asyncio.timeout(60):
        while tries < 3:
            await asyncio.sleep(0.001)
    assert not looking.done()
    assert lines[0] == "the look failed, and is tried again (KeyError)"
    await end_tasks([looking])


def test_deaths_returns_and_the_supervisors_own_return_are_logged_once() -> None:
    lines: list[str] = []
    pids: dict[str, int] = {}
    watch = SlotWatch(
        lines.append, pids.__setitem__, {"decode-0": 1, "supervisor": 9}, one_machine=False
    )

    def take(state: SlotState, pid: int = 0, supervisor: int = 9) -> list[str]:
        lines.clear()
        for _ in range(2):
            watch.take(SupervisionStatus(supervisor, "", {"decode-0": SlotStatus(state, pid)}))
        return list(lines)

    assert take(SlotState(Phase.RUNNING), 1) == []
    (died,) = take(SlotState(Phase.BACKING_OFF, 1, "boom"))
    assert died == "decode-0 died; restarting it (boom)"
    assert take(SlotState(Phase.STARTING, 1, "boom")) == []
    assert take(SlotState(Phase.RUNNING, 1, "boom"), 2) == ["decode-0 is back"]
    assert pids == {"decode-0": 2}
    (loops,) = take(SlotState(Phase.CRASH_LOOP, 5, "boom"))
    assert "keeps dying, 5 times so far: boom" in loops
    assert take(SlotState(Phase.CRASH_LOOP, 5, "boom"), supervisor=10) == [
        "the supervisor was restarted"
    ]
    assert pids["supervisor"] == 10
    lines.clear()
    watch.take(None)
    assert lines == []


@pytest.mark.parametrize("one_machine", [True, False])
def test_the_supervisors_end_is_shown_if_it_ran_here(one_machine: bool) -> None:
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    lines: list[str] = []
    pids = {"supervisor": first.pid}
    watch = SlotWatch(lines.append, lambda *_: None, pids, one_machine=one_machine)
    for process, following in ((first, second.pid), (second, 1)):
        process.kill()
        process.wait(60)
        watch.take(SupervisionStatus(following, ""))
    how = " (killed by SIGKILL)" if one_machine and knows_exits() else ""
    assert lines == [f"the supervisor was restarted{how}"] * 2


def test_joins_and_leaves_are_logged_and_a_drain_is_no_death() -> None:
    lines: list[str] = []
    pids: dict[str, int] = {}
    watch = SlotWatch(
        lines.append, pids.__setitem__, {"decode-0": 1, "supervisor": 9}, one_machine=False
    )

    def take(**news: tuple[Phase, int]) -> list[str]:
        lines.clear()
        told = {
            slot.replace("_", "-"): SlotStatus(SlotState(phase), pid)
            for slot, (phase, pid) in news.items()
        }
        for _ in range(2):
            watch.take(SupervisionStatus(9, "", told))
        return list(lines)

    assert take(decode_0=(Phase.RUNNING, 1), decode_1=(Phase.STARTING, 0)) == []
    assert take(decode_0=(Phase.RUNNING, 1), decode_1=(Phase.RUNNING, 2)) == ["decode-1 has joined"]
    assert take(decode_0=(Phase.DRAINING, 1), decode_1=(Phase.LEAVING, 2)) == []
    assert take(decode_0=(Phase.RUNNING, 3)) == ["decode-0 is back", "decode-1 has left"]
    assert pids == {"decode-0": 3, "decode-1": 0}
