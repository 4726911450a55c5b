"""What the launcher says of the supervisor's news."""

from __future__ import annotations

from deploy.launcher.part_watch import SlotWatch
from deploy.supervisor.pool_keeper import Phase, SlotState
from deploy.supervisor.slot_board import SlotNews, Supervision


def test_deaths_returns_and_the_supervisors_own_return_are_told_once() -> None:
    lines: list[str] = []
    pids: dict[str, int] = {}
    watch = SlotWatch(lines.append, pids.__setitem__, {"decode-0": 1, "supervisor": 9})

    def take(state: SlotState, pid: int = 0, supervisor: int = 9) -> list[str]:
        lines.clear()
        for _ in range(2):
            watch.take(Supervision(supervisor, "", {"decode-0": SlotNews(state, pid)}))
        return list(lines)

    assert take(SlotState(Phase.RUNNING), 1) == []
    (died,) = take(SlotState(Phase.BACKING_OFF, 1, "boom"))
    assert died == "decode-0 died; it is started again (boom)"
    assert take(SlotState(Phase.STARTING, 1, "boom")) == []
    assert take(SlotState(Phase.RUNNING, 1, "boom"), 2) == ["decode-0 is back"]
    assert pids == {"decode-0": 2}
    (loops,) = take(SlotState(Phase.CRASH_LOOP, 5, "boom"))
    assert "keeps dying, 5 times by now: boom" in loops
    assert take(SlotState(Phase.CRASH_LOOP, 5, "boom"), supervisor=10) == [
        "the supervisor was started again"
    ]
    assert pids["supervisor"] == 10
    lines.clear()
    watch.take(None)
    assert lines == []


def test_whoever_joins_and_leaves_is_told_of_and_a_drain_is_no_death() -> None:
    lines: list[str] = []
    pids: dict[str, int] = {}
    watch = SlotWatch(lines.append, pids.__setitem__, {"decode-0": 1, "supervisor": 9})

    def take(**news: tuple[Phase, int]) -> list[str]:
        lines.clear()
        told = {
            slot.replace("_", "-"): SlotNews(SlotState(phase), pid)
            for slot, (phase, pid) in news.items()
        }
        for _ in range(2):
            watch.take(Supervision(9, "", told))
        return list(lines)

    assert take(decode_0=(Phase.RUNNING, 1), decode_1=(Phase.STARTING, 0)) == []
    assert take(decode_0=(Phase.RUNNING, 1), decode_1=(Phase.RUNNING, 2)) == ["decode-1 has joined"]
    assert take(decode_0=(Phase.DRAINING, 1), decode_1=(Phase.LEAVING, 2)) == []
    assert take(decode_0=(Phase.RUNNING, 3)) == ["decode-0 is back", "decode-1 has left"]
    assert pids == {"decode-0": 3, "decode-1": 0}
