"""Log lines as text and as JSON, with the request that they are about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from baton.telemetry.logs import (
    ErrorRow,
    Service,
    current_request_id,
    formatter,
    log_to_stream,
    of_request,
)


@pytest.fixture
def root() -> Iterator[None]:
    """The root logger's handlers and level are put back."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_text(root: None) -> None:
    stream = io.StringIO()
    log_to_stream(stream, "info", "text", Service.WORKER, "decode-0")
    logging.getLogger("a").info("it is %d", 3)
    logging.getLogger("a").debug("nobody reads this")
    assert stream.getvalue().endswith("INFO a: it is 3\n")


def test_json_has_the_process_and_the_request(root: None) -> None:
    stream = io.StringIO()
    log_to_stream(stream, "info", "json", Service.WORKER, "decode-0")
    logger = logging.getLogger("a")
    logger.info("before")
    with of_request(request_id="mine"):
        logger.info("arrived")
        with of_request(answer_id="cmpl-1", trace_id="0af7"):
            assert current_request_id() == "mine"
            logger.warning("it is %d", 3, extra={"tokens": 7})
            logger.info("its own", extra={"answer_id": "cmpl-3"})
        logger.info("answered")
    assert current_request_id() == ""
    before, arrived, within, own, answered = lines(stream)
    assert all(
        (row["service"], row["instance"]) == ("baton-worker", "decode-0") for row in lines(stream)
    )
    assert not {"request_id", "answer_id", "trace_id"} & before.keys()
    assert within["message"] == "it is 3"
    assert within["level"] == "WARNING"
    assert within["logger"] == "a"
    assert within["time"]
    ids = [within[name] for name in ("request_id", "answer_id", "trace_id", "tokens")]
    assert ids == ["mine", "cmpl-1", "0af7", 7]
    assert own["answer_id"] == "cmpl-3"
    for row in (arrived, answered):
        assert row["request_id"] == "mine"
        assert "answer_id" not in row


def test_a_stack_is_one_line(root: None) -> None:
    stream = io.StringIO()
    log_to_stream(stream, "info", "json", Service.WORKER, "decode-0")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    (line,) = lines(stream)
    assert "ValueError: no" in line["exc_info"]


async def test_tasks_that_a_request_begins_are_about_it() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter("json", Service.ROUTER, "router-0"))
    logger = logging.Logger("own")
    logger.addHandler(handler)

    async def work() -> None:
        await asyncio.sleep(0)
        logger.info("done")

    async def request(name: str) -> None:
        with of_request(request_id=name):
            await asyncio.create_task(work())

    await asyncio.gather(request("r-1"), request("r-2"))
    assert sorted(line["request_id"] for line in lines(stream)) == ["r-1", "r-2"]


def test_a_row_of_errors_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    row = ErrorRow(logging.getLogger("a"), "it could not be done")
    for divisor in (0, 0, 0, 1, 1, 0, 1):
        with row.caught():
            1 / divisor
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "it could not be done; further errors are only counted",
        "it could not be done; errors in a row: 3",
        "it could not be done; further errors are only counted",
        "it could not be done; errors in a row: 1",
    ]
    assert caplog.records[0].exc_info is not None
