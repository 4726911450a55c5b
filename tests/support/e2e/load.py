"""Steady requests to a cluster, all alike: every answer must come, and be the same."""

from __future__ import annotations

import threading
import time

import httpx

from tests.support.e2e.cluster import START_S, UpProcess


class Load:
    """One request after the other, until it is ended; all must have the same answer."""

    def __init__(self, up: UpProcess) -> None:
        self._up = up
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {
            "model": self._up.model,
            "prompt": "Once upon a time",
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        with httpx.Client(trust_env=False, timeout=START_S) as client:
            while not self._over.is_set():
                answer = client.post(f"{self._up.http}/v1/completions", json=body)
                if answer.status_code == httpx.codes.OK:
                    self.answers.append(answer.json()["choices"][0]["text"])
                else:
                    self.failures.append(answer.text)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(START_S)

    def goes_on(self) -> None:
        """Three more answers from now on."""
        count, end = len(self.answers), time.monotonic() + START_S
        while len(self.answers) < count + 3:
            assert time.monotonic() < end, "no answers come"
            assert not self.failures, self.failures[0]
            time.sleep(0.05)

    def check(self) -> None:
        assert not self.failures, self.failures[0]
        assert len(set(self.answers)) == 1
