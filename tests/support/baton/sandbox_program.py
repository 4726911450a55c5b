"""A program for sandboxes whose requests say what it does."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_GET_DUMPABLE = 3


def prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    if "refuse" in setup:
        raise ValueError(setup["refuse"])
    if "take_bytes" in setup:
        bytearray(setup["take_bytes"])
    if setup.get("burn"):
        _burn()
    if setup.get("abort"):
        os.abort()
    if "killed_until" in setup and not Path(setup["killed_until"]).exists():
        # The next one goes on, if it is to.
        if setup["once"]:
            Path(setup["killed_until"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    prepared = bytearray(setup.get("prepared_bytes", 0))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "echo":
                return {"echo": request["text"]}
            case "process":
                return {"pid": os.getpid(), "prepared": len(prepared)}
            case "limits":
                soft = {
                    name: resource.getrlimit(getattr(resource, name))[0]
                    for name in ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_STACK")
                }
                score = Path("/proc/self/oom_score_adj").read_text()
                dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE)
                return {**soft, "oom_score_adj": int(score), "dumpable": dumpable}
            case "wait":  # until a file says that this may end
                Path(request["began"]).touch()
                while not Path(request["until"]).exists():
                    time.sleep(0.005)
                return {}
            case "take":
                return {"taken": len(bytearray(request["bytes"]))}
            case "burn":
                _burn()
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return {}

    return answer


def _burn() -> None:
    while True:
        pass
