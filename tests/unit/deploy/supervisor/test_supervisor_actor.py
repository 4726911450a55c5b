"""The settings of each slot's worker."""

from __future__ import annotations

from deploy.supervisor.supervisor_actor import settings_in
from tests.support.deploy.supervisor_actor import settings


def test_a_worker_differs_from_others_in_slot_and_pool_only() -> None:
    decode = settings("decode", 0)
    assert settings_in(decode, "decode-0") == decode
    assert settings_in(decode, "decode-2") == decode.model_copy(update={"slot": "decode-2"})
    named = {"pool": "long-prompts", "slot": "long-prompts-0"}
    assert settings_in(decode, "long-prompts-0") == decode.model_copy(update=named)
