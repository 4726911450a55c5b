"""The audit log: operators' calls and refused requests."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.errors import BatonError, Forbidden, NotFound, Unauthenticated
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.access.audit import MAX_REFUSALS_PER_S, Refusals, note_keys, operator_call
from tests.support.router.access_access import bearer, key

ADMIN = bearer("rules")


def access(**fields: Any) -> Access:
    config = Config(keys=(key("rules", "admin"), key("asks", "inference")), **fields)
    return Access(config, RouterMetrics(CollectorRegistry()))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [one for one in caplog.records if one.name == "baton.audit"]
    assert all(one.levelno == logging.INFO for one in found)
    return [json.loads(one.getMessage()) for one in found]


def test_a_call_is_written_with_its_key_and_its_result(caplog: pytest.LogCaptureFixture) -> None:
    there = access()
    with operator_call(there, ADMIN, "req-1", "drain", "decode-0", force=True):
        assert lines(caplog) == [], "how it ends is not known yet"
    expected = {"action": "drain", "object": "decode-0", "force": True, "key": "rules"}
    assert lines(caplog) == [expected | {"result": "ok", "request_id": "req-1"}]
    caplog.clear()
    for error, result in ((NotFound("no such worker"), "not_found"), (KeyError(), "KeyError")):
        with (
            pytest.raises(type(error)),
            operator_call(there, ADMIN, "req-2", "scale", "decode", count=3),
        ):
            raise error
        assert lines(caplog)[-1]["result"] == result
    assert "Bearer" not in caplog.text


@pytest.mark.parametrize(("headers", "error"), [(bearer("asks"), Forbidden), ({}, Unauthenticated)])
def test_only_operators_run_it(headers: dict[str, str], error: type[BatonError]) -> None:
    ran = []
    with pytest.raises(error), operator_call(access(), headers, "", "drain", "decode-0"):
        ran.append(1)
    assert ran == []


def test_a_quiet_log_level_leaves_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with operator_call(access(), ADMIN, "", "drop cache", "all workers"):
            pass
    finally:
        root.setLevel(level)
    assert len(lines(caplog)) == 1


def test_refusals_are_written_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.2]
    refusals = Refusals(access(require_key=True), lambda: now[0])

    def refuse(error: BatonError, headers: dict[str, str]) -> None:
        refusals.add(error, headers, action="POST /v1/x", client="10.0.0.9", request_id="r")

    refuse(Unauthenticated("no key"), bearer("wrong-secret"))
    refuse(Forbidden("not yours"), bearer("asks"))
    first = {"action": "POST /v1/x", "client": "10.0.0.9", "request_id": "r"}
    assert lines(caplog) == [
        first | {"key": "", "result": "invalid_api_key"},
        first | {"key": "asks", "result": "forbidden"},
    ]
    refuse(NotFound("no such path"), {})
    assert len(lines(caplog)) == 2, "a 404 is no refusal"
    for _ in range(1000):
        refuse(Unauthenticated("no key"), {})
    assert len(lines(caplog)) == MAX_REFUSALS_PER_S
    now[0] += 1
    refuse(Unauthenticated("no key"), {})
    assert lines(caplog)[-1]["left_out"] == 1000 - (MAX_REFUSALS_PER_S - 2)
    assert "wrong-secret" not in caplog.text


def test_changed_keys_are_written_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    ann, ben, eve = key("ann", "inference"), key("ben", "inference"), key("eve", "admin")
    note_keys("keys.json", [ann, ben], [ben, ann])
    assert lines(caplog) == []
    raised = ben.model_copy(update={"priority": 3})
    note_keys("keys.json", [ann, ben], [raised, eve])
    (line,) = lines(caplog)
    assert (line["action"], line["object"], line["result"]) == ("read keys", "keys.json", "ok")
    assert (line["added"], line["removed"], line["changed"]) == (["eve"], ["ann"], ["ben"])
    assert ann.sha256 not in caplog.text
