"""A live cluster of timed workers whose roles and number follow the traffic, with Ray and the
supervisor.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

import httpx
import pytest

from loadtest.common.peer_servers import SERVED_NAME
from tests.support.e2e.api import series
from tests.support.e2e.cluster import START_S, UpProcess
from tests.support.e2e.timed_up import PROGRAM

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

FOLLOWS_S = 60.0
CONFIG = """
local_prefill = "never"
slo_ttft_s = 1.0
slo_tpot_s = 0.08
[autoscaler]
enabled = true
interval_s = 1.0
cooldown_s = 3.0
"""
GROWS = (
    CONFIG
    + """
min_workers = 2
max_workers = 3
"""
)
LONG_ANSWERS = {"prompt": "a" * 20, "max_tokens": 100}
LONG_PROMPTS = {"prompt": "a" * 1500, "max_tokens": 2}


class Clients:
    """Ask as long as the test is inside; refusals are theirs to bear, lost answers are not."""

    def __init__(self, url: str, body: dict[str, object], count: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._url, self._end = url, threading.Event()
        self._body = {"model": SERVED_NAME, "ignore_eos": True, **body}
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(START_S)

    def _ask(self) -> None:
        while not self._end.is_set():
            answer = httpx.post(f"{self._url}/v1/completions", json=self._body, timeout=START_S)
            self.statuses[answer.status_code] += 1
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 429:
                time.sleep(0.2)
            else:
                usage = answer.json()["usage"]
                assert usage["completion_tokens"] == self._body["max_tokens"]


def wait_for_roles(up: UpProcess, prefill: int, decode: int) -> None:
    end = time.monotonic() + FOLLOWS_S
    while True:
        told = httpx.get(f"{up.http}/v1/cache/stats", timeout=START_S).json()["workers"]
        roles = Counter(worker["role"] for worker in told)
        if roles == {"prefill": prefill, "decode": decode}:
            return
        # It is there once something was logged.
        log = up.logs / "supervisor.log"
        said = log.read_text() if log.exists() else ""
        assert time.monotonic() < end, f"{roles}\n{said}"
        time.sleep(0.2)


def test_roles_follow_the_traffic_and_come_back(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(CONFIG)
    arguments = ("--prefill", "2", "--decode", "1", "--config", str(config))
    with UpProcess(*arguments, program=PROGRAM) as up:
        up.wait_ready(2 * START_S)
        with Clients(up.http, LONG_ANSWERS, 40):
            wait_for_roles(up, 1, 2)
        with Clients(up.http, LONG_PROMPTS, 8):
            wait_for_roles(up, 2, 1)
        for action in ("to_decode", "to_prefill"):
            assert series(up, "baton_autoscaler_decisions_total", action=action, mode="live")
        up.terminate()
        assert up.wait() == 0, up.text


def test_a_pool_grows_under_load_and_is_drained_without_losing_a_request(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(GROWS)
    arguments = ("--prefill", "1", "--decode", "1", "--config", str(config))
    with UpProcess(*arguments, program=PROGRAM) as up:
        up.wait_ready(2 * START_S)
        with Clients(up.http, LONG_ANSWERS, 40) as many:
            wait_for_roles(up, 1, 2)
        # While it is drained there are sequences to move.
        with Clients(up.http, LONG_ANSWERS, 4) as few:
            wait_for_roles(up, 1, 1)
        assert many.statuses.keys() == few.statuses.keys() == {httpx.codes.OK}
        for action in ("grow", "shrink"):
            assert series(up, "baton_autoscaler_decisions_total", action=action, mode="live")
        up.terminate()
        assert up.wait() == 0, up.text
