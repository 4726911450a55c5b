"""What further workers of a pool are told."""

from __future__ import annotations

import pytest

from deploy.actor_settings import ActorSettings
from deploy.slot_settings import SlotSettings


def settings(pool: str, place: int, number: int) -> ActorSettings:
    return ActorSettings(
        config={},
        pool=pool,
        slot=f"{pool}-{place}",
        model_path="model",
        model_name="name",
        draft_model_path="",
        redis_url="",
        cluster_id="id",
        threads=2,
        core_board="cores",
        core_lines=5,
        number=number,
        workers_here=3,
        log_file=f"/logs/{pool}-{place}.log",
        launcher=1,
        launcher_started=0.0,
    )


FIRST = (settings("prefill", 0, 0), settings("decode", 0, 1), settings("decode", 1, 2))


def test_the_first_ones_are_told_what_they_were_told_before() -> None:
    slots = SlotSettings(FIRST)
    assert [slots.of(one.slot) for one in FIRST] == list(FIRST)
    assert slots.pools == {"prefill": 1, "decode": 2}


def test_others_are_like_them_in_a_place_of_their_own() -> None:
    slots = SlotSettings(FIRST)
    third = slots.of("decode-2")
    assert (third.pool, third.slot, third.log_file) == ("decode", "decode-2", "/logs/decode-2.log")
    assert third.core_board == "cores"
    further = [slots.of(f"{pool}-{n}") for pool in ("prefill", "decode") for n in range(2, 9)]
    numbers = [one.number for one in (*FIRST, third, slots.of("prefill-1"), *further)]
    # decode-2 is among them twice.
    assert len(set(numbers)) == len(numbers) - 1


def test_where_the_board_is_full_cores_are_shared_by_number() -> None:
    slots = SlotSettings(FIRST)
    last = slots.of("decode-7")
    assert last.number >= last.core_lines
    assert last.core_board == ""


def test_an_unknown_pool_has_no_workers() -> None:
    with pytest.raises(KeyError):
        SlotSettings(FIRST).of("encode-0")
