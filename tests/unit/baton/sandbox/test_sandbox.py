"""Sandboxed children: bounds, replacements and ends. The program obeys its requests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.errors import DeadlineExceeded, Unavailable
from baton.sandbox import sandbox as module
from baton.sandbox.sandbox import BoundExceeded, Bounds, ProgramBroken, Sandbox

PROGRAM = "tests.support.baton.sandbox_program"
WAIT_S = 60
MEMORY = 64 << 20
BOUNDS = Bounds(cpu_s=0.3, memory_bytes=MEMORY, prepare_cpu_s=5.0, prepare_memory_bytes=256 << 20)


def sandbox(bounds: Bounds = BOUNDS, **setup: Any) -> Sandbox:
    return Sandbox(PROGRAM, lambda: setup, bounds)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pid_of(one: Sandbox) -> int:
    return int(one.ask({"do": "process"})["pid"])


def test_any_text_is_answered_as_it_is() -> None:
    one = sandbox()
    for text in ("", "\n\r\u2028\x00\x1c", "日本 😀", "half a pair \ud83d", "x" * 100_000):
        assert one.ask({"do": "echo", "text": text}) == {"echo": text}


def test_one_child_answers_requests_that_come_one_after_another() -> None:
    one = sandbox()
    assert pid_of(one) == pid_of(one)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"do": "burn"}, r"more than 0\.3 s of CPU time"),
        ({"do": "take", "bytes": 2 * MEMORY}, "more than 64 MiB of memory"),
        ({"do": "abort"}, "more than 64 MiB of memory"),
        ({"do": "exit"}, "exit code 3"),
    ],
)
def test_a_request_beyond_its_bounds_costs_one_child_and_nothing_else(
    request_: dict[str, Any], why: str
) -> None:
    one = sandbox()
    first = pid_of(one)
    cpu = time.process_time()
    with pytest.raises(BoundExceeded, match=why):
        one.ask(request_)
    assert time.process_time() - cpu < 0.1
    assert has_ended(first)
    assert pid_of(one) != first


def test_memory_is_bounded_beyond_what_was_prepared() -> None:
    one = sandbox(prepared_bytes=2 * MEMORY)
    assert one.ask({"do": "process"})["prepared"] == 2 * MEMORY
    assert one.ask({"do": "take", "bytes": MEMORY // 2}) == {"taken": MEMORY // 2}
    with pytest.raises(BoundExceeded):
        one.ask({"do": "take", "bytes": MEMORY + (1 << 20)})


def test_a_child_leaves_no_core_dump_and_goes_first_when_memory_ends() -> None:
    limits = sandbox().ask({"do": "limits"})
    assert limits["RLIMIT_CORE"] == 0
    assert limits["dumpable"] == 0
    assert limits["RLIMIT_STACK"] == 4 << 20
    assert limits["oom_score_adj"] == 1000


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ({"refuse": "no such thing"}, "^no such thing$"),
        ({"take_bytes": 1 << 32}, "MemoryError"),
        ({"abort": True}, r"its process ended \(more than 256 MiB of memory\)"),
        ({"burn": True}, r"its process ended \(more than 0\.2 s\)"),
    ],
)
def test_a_program_that_cannot_be_prepared(setup: dict[str, Any], why: str) -> None:
    bounds = Bounds(0.3, MEMORY, 0.2 if "burn" in setup else 5.0, 256 << 20)
    one = sandbox(bounds, **setup)
    for _ in range(2):
        with pytest.raises(ProgramBroken, match=why):
            one.ask({"do": "process"})


def test_a_request_is_answered_while_another_one_is_at_work(tmp_path: Path) -> None:
    one = sandbox()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(
            one.ask, {"do": "wait", "began": str(tmp_path / "a"), "until": str(tmp_path / "b")}
        )
        until((tmp_path / "a").exists)
        assert one.ask({"do": "echo", "text": "x"}) == {"echo": "x"}
        assert not slow.done()
        (tmp_path / "b").touch()
        assert slow.result(WAIT_S) == {}


def test_the_killed_child_of_an_innocent_request_is_replaced(tmp_path: Path) -> None:
    one = sandbox()
    first = pid_of(one)
    os.kill(first, signal.SIGKILL)
    assert pid_of(one) != first
    with pytest.raises(Unavailable, match=r"was killed \(SIGKILL\)"):
        one.ask({"do": "kill"})
    assert one.ask({"do": "echo", "text": "x"}) == {"echo": "x"}


@pytest.mark.parametrize("start", [True, False])
def test_a_program_whose_preparation_is_killed_is_not_broken(tmp_path: Path, start: bool) -> None:
    """The kernel may have ended it because the host has no memory."""

    def use(once: bool) -> None:
        one = sandbox(killed_until=str(tmp_path / str(once)), once=once)
        if start:
            one.start()
        assert one.ask({"do": "echo", "text": "x"}) == {"echo": "x"}

    use(once=True)
    with pytest.raises(Unavailable, match=r"was killed \(SIGKILL\)"):
        use(once=False)


def test_the_prepared_process_is_replaced_and_takes_its_children_with_it() -> None:
    one = sandbox()
    first = pid_of(one)
    os.kill(psutil.Process(first).ppid(), signal.SIGKILL)
    until(lambda: has_ended(first))
    assert pid_of(one) != first


def test_a_child_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sandbox()
    first = pid_of(one)
    psutil.Process(first).suspend()
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_WAIT_S", 0.1)
        with pytest.raises(DeadlineExceeded, match="overloaded"):
            one.ask({"do": "process"})
    assert has_ended(first)
    assert pid_of(one) != first


def test_processes_end_with_their_sandbox() -> None:
    one = sandbox()
    child = pid_of(one)
    parent = psutil.Process(child).ppid()
    del one
    gc.collect()
    until(lambda: has_ended(child) and has_ended(parent))


def test_processes_end_with_the_process_that_asks() -> None:
    script = (
        "import time\n"
        "from baton.sandbox.sandbox import Bounds, Sandbox\n"
        f"one = Sandbox({PROGRAM!r}, dict, Bounds(600.0, 1 << 26, 5.0, 1 << 28))\n"
        "print(one.ask({'do': 'process'})['pid'], flush=True)\n"
        "one.ask({'do': 'burn'})"
    )
    asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with asking:
        assert asking.stdout is not None
        child = psutil.Process(int(asking.stdout.readline()))
        parent = child.ppid()
        asking.kill()
        try:
            until(lambda: has_ended(child.pid) and has_ended(parent))
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def test_many_threads_share_one_prepared_process() -> None:
    one = sandbox()
    barrier = threading.Barrier(4)

    def ask(number: int) -> tuple[int, str]:
        barrier.wait(WAIT_S)
        parent = psutil.Process(pid_of(one)).ppid()
        return parent, one.ask({"do": "echo", "text": str(number)})["echo"]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    assert [text for _, text in found] == ["0", "1", "2", "3"]
    assert len({parent for parent, _ in found}) == 1
