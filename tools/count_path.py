"""Counts what one streamed chat request runs: ``python -m tools.count_path``.

For the router, the prefill worker and the decode worker it counts the product's modules that the
request enters, its functions, and the classes that it instantiates. A cluster with one worker per
role runs with ``tools.path_hook``. Code that also runs without a request does not count.

It imports nothing of the product, so that it can measure another commit: run it as a file, from
that commit's checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOOK = Path(__file__).resolve().parent / "path_hook"
IDLE_S = 4.0
"""Time for which the cluster is left idle, in seconds. All periodic work of the cluster runs within
this time."""
READY_S = 300.0
ANSWER_S = 60.0
_SETTLE_S = 0.5
_END_S = 60.0
_ROLES = {
    "router": "router.",
    "prefill worker": "prefill_worker.",
    "decode worker": "decode_worker.",
}
_KINDS = ("modules", "functions", "classes")
_ROW = "{:16}{:>9}{:>11}{:>9}"


def main() -> None:
    """Run a cluster, send a request, and show the counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", type=Path, help="file for the counts and names")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-path-") as folder:
        found = counts(measured(Path(folder)))
    rows = [_ROW.format("", *_KINDS)]
    rows += [
        _ROW.format(role, *(len(names[kind]) for kind in _KINDS)) for role, names in found.items()
    ]
    sys.stdout.write("\n".join(rows) + "\n")
    if chosen.json:
        sizes = {
            role: {kind: len(seen) for kind, seen in names.items()} for role, names in found.items()
        }
        chosen.json.write_text(json.dumps({"counts": sizes, "names": found}, indent=1))


def counts(processes: list[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return, by role, the names of modules, functions and classes that run only for a request.

    A process has a role if it runs that role's package for a request. If several processes have the
    same role, the one that runs the most is counted: the others only import the package. A role
    without a process is an error.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for process in processes:
        by_phase = {
            phase: {(module, name) for module, name in seen}
            for phase, seen in process["functions"].items()
        }
        functions = by_phase.get("request", set()) - by_phase.get("idle", set())
        modules = {module for module, _ in functions}
        made = process["classes"]
        classes = set(made.get("request", ())) - set(made.get("idle", ()))
        for role, room in _ROLES.items():
            known = len(found[role]["classes"]) if role in found else -1
            if any(module.startswith(room) for module in modules) and len(classes) > known:
                found[role] = {
                    "modules": sorted(modules),
                    "functions": sorted(f"{module}.{name}" for module, name in functions),
                    "classes": sorted(classes),
                }
    missing = [role for role in _ROLES if role not in found]
    if missing:
        raise SystemExit(f"nothing was recorded of: {', '.join(missing)}")
    return {role: found[role] for role in _ROLES}


def measured(folder: Path) -> list[Mapping[str, Any]]:
    """Run a cluster, and return what each of its processes has run while idle and for one
    request."""
    phase = folder / "phase"
    phase.write_text("")
    address, grpc_address = _free_addresses(2)
    path = [str(HOOK), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "BATON_COUNT_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # While there are prefill workers, they compute the prompts.
        "BATON_LOCAL_PREFILL": "auto",
        "BATON_POLICY": "round_robin",
    }
    baton = Path(sys.executable).parent / "baton"
    command = [str(baton), "serve", "--http", address, "--grpc", grpc_address]
    with (folder / "log").open("wb") as log:
        cluster = subprocess.Popen(  # noqa: S603 - our own program
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_ready(cluster, address, folder / "log")
        model = _model(address)
        for number in range(3):
            _ask(address, model, f"Warm-up {number}: tell me of a city by the sea.")
        for name, work in (("idle", ""), ("request", "Name the first number that is prime.")):
            time.sleep(_SETTLE_S)
            phase.write_text(name)
            time.sleep(_SETTLE_S if work else IDLE_S)
            if work:
                _ask(address, model, work)
                time.sleep(_SETTLE_S)
        phase.write_text("end")
        time.sleep(2 * _SETTLE_S)
    finally:
        cluster.send_signal(signal.SIGINT)
        try:
            cluster.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(cluster.pid, signal.SIGKILL)
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def _wait_until_ready(cluster: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and cluster.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
                if json.load(answer)["status"] == "ok":
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the cluster is not ready:\n{log.read_text(errors='replace')[-2000:]}")


def _model(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=ANSWER_S) as models:
        return str(json.load(models)["data"][0]["id"])


def _ask(address: str, model: str, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
        if b"[DONE]" not in answer.read():
            raise SystemExit("an answer has not ended")


def _free_addresses(count: int) -> list[str]:
    """Return ``count`` addresses (host:port) whose ports are free and different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


if __name__ == "__main__":
    main()
