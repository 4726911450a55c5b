"""Shared by the tests of rolling restart and by other tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.e2e.cluster import START_S, UpProcess

DEADLINE_S = 120.0


CLIENTS = 3


PROMPTS = ("The sea at night", "A list of numbers: 1, 2,", "def main():", "Once upon a time")

AGAIN_S = 0.25


def answer(up: UpProcess, number: int) -> str:
    """One answer, streamed, seeded by its number."""
    body = {
        "model": up.model,
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 60,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text, finish = "", None
    with (
        httpx.Client(trust_env=False, timeout=DEADLINE_S) as client,
        client.stream("POST", f"{up.http}/v1/completions", json=body) as response,
    ):
        assert response.status_code == httpx.codes.OK, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                finish = chunk["choices"][0]["finish_reason"] or finish
    assert finish == "length"
    return text


@dataclass
class Load:
    """Clients that ask one question after the other.

    Whose connection breaks while a router is restarted asks again, once; at any other time it has
    failed.
    """

    up: UpProcess
    expected: list[str]
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _restarting: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def router_restarts(self) -> Iterator[None]:
        """Within this a router ends, and its connections with it."""
        self._restarting.set()
        try:
            yield
        finally:
            self._restarting.clear()

    def run(self, first: int) -> None:
        number = first
        while not self.stop.is_set():
            self.ask(number % len(self.expected))
            number += CLIENTS

    def ask(self, number: int) -> None:
        """One question; what became of it is counted."""
        try:
            text = self._answer(number)
        except (httpx.TransportError, AssertionError) as error:
            self.failed.append(repr(error))
            return
        self.answered += 1
        if text != self.expected[number]:
            self.wrong.append(text)

    def _answer(self, number: int) -> str:
        try:
            return answer(self.up, number)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            if not self._restarting.is_set():
                raise
        time.sleep(AGAIN_S)
        return answer(self.up, number)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)
