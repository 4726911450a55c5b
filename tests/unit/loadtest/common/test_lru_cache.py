"""A replayed worker's cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.common.lru_cache import LruCache


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_least_used_go_first_from_their_ends() -> None:
    cache = LruCache(4)
    cache.use(chain("a", "b", "c"))
    cache.use(chain("a", "x", "y"))
    assert cache.leading(chain("a", "b", "c")) == 2
    assert cache.leading(chain("a", "x", "y")) == 3
    assert cache.drain_changes() == (chain("b", "a", "y", "x"), chain("c"))
    assert cache.drain_changes() == ([], [])


def test_a_prompt_that_does_not_fit_keeps_its_beginning() -> None:
    cache = LruCache(2)
    cache.use(chain("a", "b", "c"))
    assert cache.leading(chain("a", "b", "c")) == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.one_of(st.none(), st.integers(1, 6)),
    st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), unique=True), st.booleans())),
)
def test_changes_tell_what_is_held(most: int | None, uses: list[tuple[list[str], bool]]) -> None:
    cache, told = LruCache(most), set[bytes]()
    for names, drain in uses:
        cache.use(chain(*names))
        if drain:
            stored, removed = cache.drain_changes()
            assert not set(stored) & set(removed)
            told = (told | set(stored)) - set(removed)
            assert told == {n for n in chain(*"abcdef") if cache.leading([n])}
            assert most is None or len(told) <= most
