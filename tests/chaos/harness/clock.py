"""The wall clock of a cluster under test, and its boot time: they can be made to jump (clock.c)."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_COMPILE_S = 60.0
_NANOSECONDS = 1_000_000_000


class NoClock(Exception):
    """This machine cannot make the clock jump; the message says why."""


class Clock:
    """One offset for all processes that were started with ``environment``."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into ``folder``. Raises NoClock."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise NoClock("there is no C compiler")
        self._library = folder / "clock.so"
        made = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE, "-ldl"],
            capture_output=True,
            text=True,
            timeout=_COMPILE_S,
            check=False,
        )
        if made.returncode:
            raise NoClock(f"{_SOURCE.name} does not compile: {made.stderr[:500]}")
        self._file = folder / "clock"
        self._file.write_bytes(bytes(mmap.PAGESIZE))

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes whose clock it is."""
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        """So far ahead of the machine's clock it is from now on."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", int(seconds * _NANOSECONDS)))
