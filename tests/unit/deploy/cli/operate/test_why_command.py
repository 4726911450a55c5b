"""`baton why`: what it says of a request, and of routers that did not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli.options.exit_codes import ExitCode
from tests.support.deploy.machine import Machine, machine

ATTEMPT = {
    "number": 0,
    "begun_ms": 12.0,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-1",
    "reason": "prefix",
    "migration": "",
    "ended_by": "prefill_failed",
    "prompt_tokens": 900,
    "cached_tokens": None,
    "computed_tokens": None,
    "predicted_computed_tokens": 400,
    "wait_ms": None,
    "predicted_wait_ms": 3.0,
    "reserve_ms": None,
    "fetch_ms": None,
    "compute_ms": None,
    "own_compute_ms": None,
    "predicted_compute_ms": 55.0,
    "predicted_ttft_ms": 60.0,
    "transfer_ms": None,
    "transferred_bytes": None,
}
AGAIN = ATTEMPT | {
    "number": 1,
    "begun_ms": 512.0,
    "prefill_worker": "decode-1",
    "migration": "prefill_failed",
    "ended_by": "",
    "cached_tokens": 500,
    "computed_tokens": 400,
    "wait_ms": 20.0,
    "reserve_ms": 0.0,
    "fetch_ms": 0.0,
    "compute_ms": 70.5,
    "own_compute_ms": 61.0,
}
REQUEST = {
    "router": "router-1@there",
    "id": "chatcmpl-1",
    "request_id": "mine",
    "trace_id": "",
    "tenant": "acme",
    "key": "ci",
    "class": "short",
    "outcome": "ok",
    "code": "",
    "ended_at": 1_795_000_000.0,
    "took_ms": 12_345.0,
    "prompt_tokens": 900,
    "cached_prompt_tokens": 500,
    "output_tokens": 64,
    "choices": 1,
    "admission_ms": 7.0,
    "slo_ttft_ms": 500.0,
    "ttft_ms": 610.0,
    "ttft_parts_ms": {"router": 12.0, "lost": 500.0, "compute": 70.5, "other": 27.5},
    "second_token_ms": 30.0,
    "second_token_parts_ms": {"lost": 0.0, "transfer": 0.0, "first_decode": 30.0},
    "attempts": [ATTEMPT, AGAIN],
    "dropped_attempts": 0,
}


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    # First, since it follows the system's temporary directory, too.
    tmp_path_factory.getbasetemp()
    with machine() as made:
        yield made


@contextmanager
def router(answer: Any) -> Iterator[tuple[str, list[str]]]:
    """host:port of one that gives this answer, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{made.server_port}", asked
        made.shutdown()
        thread.join()


def answer(*data: Any, answered: int = 2, routers: int | None = 2) -> dict[str, Any]:
    return {"object": "list", "data": list(data), "answered": answered, "routers": routers}


def test_a_request_is_explained(here: Machine) -> None:
    with router(answer(REQUEST)) as (address, asked):
        result = here.run("why", "mine", "--http", address)
    assert result.exit_code == 0, result.stderr
    assert asked == ["/v1/requests/mine"]
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith("chatcmpl-1 ok after 12.3 s, ended 20")
    for expected in (
        "x-request-id mine",
        "tenant acme, key ci, class short",
        "900 prompt tokens, 500 of them cached; 64 output tokens",
        "waited 7.0 ms for admission",
        "missed its SLO for the first token, 500.0 ms",
        "time to first token 610.0 ms",
        "lost 500.0 ms 82% attempts that failed or migrated",
        "then to the second 30.0 ms",
        "attempt 0 after 12.0 ms: prefill-0 → decode-1, chosen by prefix; ended by prefill_failed",
        "attempt 1 after 512.0 ms, after prefill_failed: decode-1 alone, chosen by prefix",
        "wait for the first step 3.0 ms -",
        "wait for the first step 3.0 ms 20.0 ms",
        "tokens to compute 400 400",
        "prefill steps 55.0 ms 70.5 ms",
    ):
        assert expected in lines, expected
    assert "served by router-1@there" in lines
    assert not any("trace" in line for line in lines)
    assert result.stderr == ""


def test_a_request_that_was_refused(here: Machine) -> None:
    refused = REQUEST | {
        "outcome": "shed",
        "code": "overloaded",
        "ttft_ms": None,
        "ttft_parts_ms": {},
        "second_token_ms": None,
        "second_token_parts_ms": {},
        "attempts": [],
    }
    with router(answer(refused)) as (address, _):
        result = here.run("why", "mine", "--http", address)
    assert "shed (overloaded)" in result.stdout
    assert "it had no first token" in result.stdout
    assert "time to first token" not in result.stdout


def test_json_is_what_the_router_says(here: Machine) -> None:
    with router(answer(REQUEST, REQUEST)) as (address, _):
        result = here.run("why", "mine", "--http", address, "--output", "json")
    assert json.loads(result.stdout) == [REQUEST, REQUEST]


def test_routers_that_did_not_answer_are_reported(here: Machine) -> None:
    for routers, expected in ((3, "2 of 3 router processes answered"), (None, "users.acl")):
        with router(answer(REQUEST, routers=routers)) as (address, _):
            result = here.run("why", "mine", "--http", address, "--output", "json")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == [REQUEST]
        assert result.stderr.startswith("there may be more requests with this id")
        assert expected in result.stderr


def test_a_request_that_no_router_has(here: Machine) -> None:
    with router(answer(answered=2, routers=3)) as (address, asked):
        result = here.run("why", "chatcmpl-2", "--http", address)
    assert result.exit_code == ExitCode.FAILED
    said = "has no ended request 'chatcmpl-2': 2 of 3 router processes answered"
    assert said in result.stderr
    assert len(asked) == 1


def test_what_is_no_id_is_refused(here: Machine) -> None:
    result = here.run("why", "../cluster", "--http", "127.0.0.1:1")
    assert result.exit_code == ExitCode.USAGE
    assert "is not the id of a request" in result.stderr


def test_another_server_is_reported(here: Machine) -> None:
    with router({}) as (address, _):
        result = here.run("why", "mine", "--http", address)
    assert result.exit_code == ExitCode.FAILED
    assert f"{address} is not a Baton router" in result.stderr
