"""Logs of a cluster that writes them to standard output: JSON lines of all of its processes."""

from __future__ import annotations

import json
from socket import gethostname
from typing import Any

import httpx

from tests.support.e2e.cluster import PATIENT, UpProcess
from tests.support.e2e.rolling_restart import until

DEADLINE_S = 120.0


def rows(up: UpProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(up.output) if line.startswith("{")]


def test_every_process_writes_to_standard_output() -> None:
    env = PATIENT | {"BATON_LOG_REQUESTS": "true"}
    with UpProcess("--log-to", "stdout", "--log-format", "json", "--routers", "2", env=env) as up:
        until(lambda: any(row["message"].startswith("ready in ") for row in rows(up)), "not ready")
        answer = httpx.post(
            f"{up.http}/v1/completions",
            json={"model": up.model, "prompt": "Once", "max_tokens": 2},
            headers={"x-request-id": "mine"},
            timeout=DEADLINE_S,
        )
        assert answer.status_code == 200, answer.text
        dropped = httpx.delete(
            f"{up.http}/v1/cache", headers={"x-request-id": "op-1"}, timeout=DEADLINE_S
        )
        assert dropped.status_code == 200, dropped.text
        logs = [file.name for file in up.logs.iterdir()]
        up.terminate()
        assert up.wait() == 0, up.text
    told = rows(up)
    processes = {(row["service"], row["instance"]) for row in told}
    assert processes >= {
        ("baton-launcher", "launcher"),
        ("baton-router", f"router-0@{gethostname()}"),
        ("baton-router", f"router-1@{gethostname()}"),
        ("baton-worker", "prefill-0"),
        ("baton-worker", "decode-0"),
    }
    (ended,) = [row for row in told if row["logger"] == "baton.requests"]
    assert ended["request_id"] == "mine"
    assert ended["answer_id"].startswith(answer.json()["id"])
    audit = [row for row in told if row["logger"] == "baton.audit"]
    assert ("op-1", "ok") in {(row["request_id"], row["result"]) for row in audit}
    assert {"SIGTERM"} == {row["signal"] for row in audit if "signal" in row}
    assert not {name for name in logs if name.startswith(("router", "decode", "prefill"))}, logs
