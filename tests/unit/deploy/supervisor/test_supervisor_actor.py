"""The settings of further workers of a pool."""

from __future__ import annotations

import pytest

from deploy.supervisor.supervisor_actor import SlotSettings
from tests.support.deploy.supervisor_actor import settings

FIRST = (settings("prefill", 0), settings("decode", 0), settings("decode", 1))


def test_the_first_slots_keep_their_settings() -> None:
    slots = SlotSettings(FIRST)
    assert [slots.of(one.slot) for one in FIRST] == list(FIRST)
    assert slots.pools == {"prefill": 1, "decode": 2}


def test_other_workers_receive_the_same_pool_settings() -> None:
    third = SlotSettings(FIRST).of("decode-2")
    assert third == FIRST[1].model_copy(update={"slot": "decode-2"})


def test_an_unknown_pool_has_no_workers() -> None:
    with pytest.raises(KeyError):
        SlotSettings(FIRST).of("encode-0")
