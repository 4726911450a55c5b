"""Time that only the test moves, and event loops that live in it.

Each simulated process has a loop of its own, so that one can be frozen or killed while the others
run on: a frozen loop executes nothing, and finds all that has come due when it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

MAX_STEPS = 100_000
"""More than this at one moment means that something never stops."""
THREAD_S = 0.001
"""How long a thread takes to begin what it is given."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. Its threads are callbacks: they freeze with it."""

    def __init__(self, time: VirtualTime) -> None:
        self.is_frozen = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.failures: list[str] = []
        self._time = time
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()

    # What asyncio asks of a loop

    def time(self) -> float:
        return self._time.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells that a timer was cancelled; it is dropped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()

        def run() -> None:
            if done.done():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_later(THREAD_S, run)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # What the simulation asks

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this is the running loop."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def next_time(self) -> float | None:
        """When it has something to do; None: nothing, or it is frozen."""
        if self.is_frozen:
            return None
        if self._ready:
            return self.time()
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_ready(self) -> int:
        """Run what is due. Returns how many callbacks that were."""
        while self._timers and self._timers[0][0] <= self.time():
            self._ready.append(heapq.heappop(self._timers)[2])
        count = len(self._ready)
        with self.entered():
            for _ in range(count):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        return count


class VirtualTime:
    """The clock of all processes, and what happens between them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loops: list[VirtualLoop] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def monotonic(self) -> float:
        """Stands for ``time.monotonic``."""
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have something happen outside of all processes: in the network."""
        heapq.heappush(self._events, (when, next(self._count), call))

    def advance(self, seconds: float) -> None:
        """Run everything that is due within ``seconds`` from now."""
        end = self.now + seconds
        turns = 0
        while (due := self._next()) is not None and due <= end:
            turns = turns + 1 if due <= self.now else 0
            assert turns < MAX_STEPS, "something never stops"
            self._turn(due)
        self.now = end

    def turn(self, count: int) -> None:
        """Run the next ``count`` things, at whatever time they come."""
        for _ in range(count):
            due = self._next()
            if due is None:
                return
            self._turn(due)

    def _turn(self, due: float) -> None:
        self.now = max(self.now, due)
        if self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
            return
        for loop in list(self.loops):
            due_there = loop.next_time()
            if due_there is not None and due_there <= self.now:
                loop.run_ready()

    def _next(self) -> float | None:
        times = [loop.next_time() for loop in self.loops]
        if self._events:
            times.append(self._events[0][0])
        return min((time for time in times if time is not None), default=None)
