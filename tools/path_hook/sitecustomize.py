"""Records what a process runs, for ``tools.count_path``: Python imports this module at its start.

``BATON_COUNT_PATH`` names a folder. Its file ``phase`` names the present phase; an empty phase
records nothing, and ``end`` writes ``PID.json``. The profile function is set at the first line,
since only then it also sees threads that are made later.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = os.environ.get("BATON_COUNT_PATH", "")
_ROOMS = frozenset(
    (
        "baton",
        "decode_worker",
        "deploy",
        "engine",
        "kvtransfer",
        "prefill_worker",
        "router",
        "worker",
    )
)
_POLL_S = 0.02


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._functions: dict[str, set[tuple[str, str]]] = {}
        self._classes: dict[str, set[str]] = {}
        self._seen_functions: set[tuple[str, str]] | None = None
        self._seen_classes: set[str] = set()

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record a function when it is called; Python calls this method for every call and
        return."""
        functions = self._seen_functions
        if functions is None or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _ROOMS or module.startswith("baton.v1"):
            return
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED:
            # The body of a module or a class runs at import.
            return
        functions.add((module, code.co_qualname))
        if code.co_name == "__init__" and code.co_varnames:
            made = type(frame.f_locals.get(code.co_varnames[0]))
            if made.__module__.partition(".")[0] in _ROOMS:
                self._seen_classes.add(f"{made.__module__}.{made.__qualname__}")

    def follow(self) -> None:
        """Follow the file ``phase``: switch to each phase that it names, until the phase is
        ``end``."""
        file, known = self._folder / "phase", ""
        while known != "end":
            time.sleep(_POLL_S)
            try:
                phase = file.read_text()
            except OSError:
                continue
            if phase != known:
                known = phase
                self._begin(phase)
        self._write()

    def _begin(self, phase: str) -> None:
        if phase in ("", "end"):
            self._seen_functions = None
            return
        self._seen_classes = self._classes.setdefault(phase, set())
        self._seen_functions = self._functions.setdefault(phase, set())

    def _write(self) -> None:
        found = {
            "functions": {phase: sorted(seen) for phase, seen in self._functions.items()},
            "classes": {phase: sorted(seen) for phase, seen in self._classes.items()},
        }
        part = self._folder / f"{os.getpid()}.part"
        part.write_text(json.dumps(found))
        part.rename(part.with_suffix(".json"))


if _FOLDER:
    _recorder = _Recorder(Path(_FOLDER))
    # This thread has no profile function, which would record the thread itself.
    threading.Thread(target=_recorder.follow, name="count-path", daemon=True).start()
    threading.setprofile(_recorder.profile)
    sys.setprofile(_recorder.profile)
