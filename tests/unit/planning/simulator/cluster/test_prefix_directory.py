"""The directory of prefixes against a plain model of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planning.simulator.cluster.prefix_directory import PrefixDirectory

BLOCKS = [bytes([n]) for n in range(6)]
CHANGES = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from(BLOCKS)), st.booleans())
)


@given(CHANGES, st.lists(st.sampled_from(BLOCKS), unique=True))
def test_lookups_count_leading_blocks(
    changes: list[tuple[str, list[bytes], bool]], asked: list[bytes]
) -> None:
    directory = PrefixDirectory()
    held: dict[str, set[bytes]] = {name: set() for name in "abc"}
    for name, blocks, stored in changes:
        directory.apply(name, blocks if stored else (), () if stored else blocks)
        held[name] = held[name] | set(blocks) if stored else held[name] - set(blocks)
    expected = {}
    for name, own in held.items():
        depth = next((n for n, block in enumerate(asked) if block not in own), len(asked))
        if depth:
            expected[name] = depth
    assert directory.lookup(asked) == expected
