"""A whole cluster of timed workers: Ray places them, the supervisor keeps them."""

from __future__ import annotations

import subprocess

import httpx
import pytest

from loadtest.common.peer_servers import SERVED_NAME
from tests.support.e2e.cluster import BATON, START_S, UpProcess
from tests.support.e2e.timed_up import PROGRAM

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_timed_workers_serve_change_roles_and_come_back() -> None:
    with UpProcess("--prefill", "2", "--decode", "1", program=PROGRAM) as up:
        up.wait_ready(2 * START_S)
        body = {"model": SERVED_NAME, "prompt": "a" * 600, "max_tokens": 8, "ignore_eos": True}

        def answer() -> str:
            response = httpx.post(f"{up.http}/v1/completions", json=body, timeout=START_S)
            assert response.status_code == httpx.codes.OK, response.text
            return str(response.json()["choices"][0]["text"])

        first = answer()
        assert len(first) == 8
        for command in (("role", "prefill-1", "decode"), ("drain", "decode-0")):
            subprocess.run(
                [BATON, *command, "--yes", "--http", up.state.http], check=True, timeout=START_S
            )
        up.wait_for("decode-0 is back")
        assert answer() == first
        up.terminate()
        assert up.wait() == 0, up.text
