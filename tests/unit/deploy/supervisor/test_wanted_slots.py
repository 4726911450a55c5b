"""How many slots a pool has, as it is chosen and as it is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.supervisor.wanted_slots import WantedSlots, split

POOLS = {"prefill": 1, "decode": 2}
AT_FIRST = {"prefill-0", "decode-0", "decode-1"}


def test_it_is_what_the_configuration_says_until_somebody_chooses() -> None:
    wanted = WantedSlots(POOLS)
    assert wanted.slots() == AT_FIRST
    assert wanted.choose({}) == {}
    assert wanted.slots() == AT_FIRST
    assert wanted.choose({"decode": 1, "unknown": 7}) == {}
    assert wanted.slots() == {"prefill-0", "decode-0"}
    assert wanted.choose({"decode": 3}) == {}
    assert wanted.slots() == AT_FIRST | {"decode-2"}


def test_what_was_chosen_is_remembered_where_it_is_lost() -> None:
    wanted = WantedSlots(POOLS)
    wanted.choose({"decode": 4, "prefill": 0})
    assert wanted.choose({"prefill": 0}) == {"decode": 4}
    assert wanted.slots() == {f"decode-{n}" for n in range(4)}


def test_who_lives_is_wanted_until_somebody_says_otherwise() -> None:
    wanted = WantedSlots(POOLS, ["decode-3", "decode-0", "stranger-8", "supervisor"])
    assert wanted.slots() == AT_FIRST | {"decode-2", "decode-3"}
    assert wanted.choose({}) == {"decode": 4}
    assert wanted.choose({"decode": 1}) == {}
    assert wanted.slots() == {"prefill-0", "decode-0"}


@given(st.text(), st.integers(0, 10**6))
def test_names_of_slots_come_apart_again(pool: str, number: int) -> None:
    assert split(f"{pool}-{number}") == (pool, number)


def test_what_is_no_slot_has_no_pool() -> None:
    assert split("supervisor") == split("decode-") == split("decode-x") == ("", 0)
