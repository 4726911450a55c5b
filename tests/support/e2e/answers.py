"""Answers of a cluster, whole and streamed, and how it ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from baton.security.tls import TlsFiles, client_context
from tests.support.e2e.cluster import END_S, START_S, UpProcess, processes_of, wait_until_gone

LONG = 96
"""Tokens: it runs for a second or more."""


PROMPT = "Once upon a time"


def body_of(up: UpProcess, tokens: int, prompt: str = PROMPT) -> dict[str, Any]:
    return {
        "model": up.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def streamed(up: UpProcess, tokens: int, begun: threading.Event) -> str:
    """The answer's text; ``begun`` is set with its first piece."""
    return streamed_from(up.http, body_of(up, tokens), begun)


def streamed_from(url: str, asked: dict[str, Any], begun: threading.Event) -> str:
    """The same, of any router's HTTP front."""
    body, text = asked | {"stream": True}, ""
    with (
        httpx.Client(trust_env=False, timeout=START_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def answer_of(
    up: UpProcess, tokens: int = 4, prompt: str = PROMPT, *, tls: TlsFiles | None = None
) -> str:
    body = body_of(up, tokens, prompt)
    verify = True if tls is None else client_context(tls)
    url = up.http if tls is None else up.http.replace("http://", "https://")
    with httpx.Client(trust_env=False, timeout=START_S, verify=verify) as client:
        answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def assert_only_logs(run_directory: Path) -> None:
    """The directory of a run that has ended has its logs, and no secret and no socket."""
    deadline = time.monotonic() + END_S
    # A guardian removes the rest after the last process.
    while (left := sorted(entry.name for entry in run_directory.iterdir())) != ["logs", "run.json"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert (run_directory / "logs" / "router.log").stat().st_size
    assert (run_directory / "logs" / "ray").is_dir()


def end_by_ctrl_c(up: UpProcess) -> None:
    """Ctrl-C: everything ends, and only the logs are left."""
    cluster_id, run_directory = up.cluster_id, Path(up.state.run_directory)
    up.interrupt()
    assert up.wait() == 0, up.text
    assert processes_of(cluster_id) == []
    assert_only_logs(run_directory)
    assert "Traceback" not in up.text


def end_by_sigkill(up: UpProcess) -> None:
    """SIGKILL of the launcher: everything ends, and only the logs are left."""
    cluster_id, run_directory = up.cluster_id, Path(up.state.run_directory)
    up.kill()
    assert up.wait() == -signal.SIGKILL
    assert wait_until_gone(cluster_id) == []
    assert_only_logs(run_directory)


def end_amid_an_answer(up: UpProcess) -> None:
    """SIGTERM: what runs ends first, then everything does, and only the logs are left."""
    cluster_id, run_directory = up.cluster_id, Path(up.state.run_directory)
    with ThreadPoolExecutor() as threads:
        whole = answer_of(up, LONG)
        begun = threading.Event()
        running = threads.submit(streamed, up, LONG, begun)
        assert begun.wait(START_S)
        up.terminate()
        assert running.result(END_S) == whole
    assert up.wait() == 0, up.text
    assert processes_of(cluster_id) == []
    assert_only_logs(run_directory)
    assert "Traceback" not in up.text
