"""The run over phases of a test's own: ``python -m tests.unit.loadtest.gpu.run_script …``.

Its items do what their names say. Some do it once only: a file says that they have.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from loadtest.gpu import phases, run
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Check, Fact, Item, Result, Timing
from loadtest.gpu.phases import Phase

MARK = "BATON_TEST_MARK"
"""The variable that names the file."""
_LIMIT_S = 600.0
"""Of phases whose limit no test is about."""


def right() -> Iterator[Result]:
    yield Check("error", 0.001, 0.01)
    yield Fact("sizes", {"blocks": 3})


def wrong() -> Iterator[Result]:
    yield Check("error", 0.1, 0.01)


def slow() -> Iterator[Result]:
    yield Timing("a bounded wait", 3.0, limit_s=2.0)


def crash() -> Iterator[Result]:
    yield Check("before the crash", 0.0, 0.0)
    os.kill(os.getpid(), 9)


def fail() -> NoReturn:
    raise RuntimeError("an item fails")


def hang() -> Iterator[Result]:
    time.sleep(600)
    yield from ()


def hang_once() -> Iterator[Result]:
    mark = Path(os.environ[MARK])
    if not mark.exists():
        mark.touch()
        time.sleep(600)
    yield from right()


WORKS: dict[str, Callable[[], Iterator[Result]]] = {
    work.__name__: work for work in (right, wrong, slow, crash, fail, hang, hang_once)
}


def items(names: tuple[str, ...], _place: Place, _folder: Path) -> Iterator[Item]:
    for number, name in enumerate(names):
        yield Item(f"{name} {number}", WORKS[name])


def made(described: Sequence[str]) -> tuple[Phase, ...]:
    """Phases of ``NAME=item,item`` or ``SECONDS:NAME=item,item``."""
    found = []
    for one in described:
        name, _, works = one.partition("=")
        limit, _, name = name.rpartition(":")
        limits = {plan: float(limit or _LIMIT_S) for plan in phases.PLANS}
        found.append(
            Phase(name, "what the test asks", limits, partial(items, tuple(works.split(","))))
        )
    return tuple(found)


def main(arguments: list[str]) -> int:
    """``NAME=item,item …  -- the run's own arguments``."""
    own, theirs = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    phases.PHASES = made(own)
    setattr(run, "PHASES", phases.PHASES)  # noqa: B010 - a name that it imports
    run._DRY = 1.0
    run._COMMAND = (sys.executable, "-m", "tests.unit.loadtest.gpu.run_script", *own, "--")
    return run.main(theirs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
