"""Distributions of lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from loadtest.generator.workload.lengths import Lengths


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("128", Lengths("fixed", 128)),
        ("fixed:7", Lengths("fixed", 7)),
        ("uniform:64-256", Lengths("uniform", 64, 256)),
        ("normal:100,20", Lengths("normal", 100, 20)),
        ("lognormal:200,0.8,1024", Lengths("lognormal", 200, 0.8, 1024)),
    ],
)
def test_forms(text: str, made: Lengths) -> None:
    assert Lengths.parse(text) == made
    assert Lengths.parse(made.text()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "0",
        "fixed:",
        "uniform:5-2",
        "uniform:3",
        "zipf:1",
        "normal:1,2,3,4",
        "normal:-4,1",
        "lognormal:0,1",
        "lognormal:2000,1,1024",
        "fixed:nan",
        "1e99",
    ],
)
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


@given(
    st.one_of(
        st.builds(Lengths, st.just("fixed"), st.integers(1, 4096)),
        st.builds(Lengths, st.just("uniform"), st.integers(1, 100), st.integers(100, 4096)),
        st.builds(
            Lengths,
            st.sampled_from(("normal", "lognormal")),
            st.floats(1, 500),
            st.floats(0, 5),
            st.integers(500, 4096),
        ),
    ),
    st.integers(0, 1000),
)
def test_draws_are_lengths(lengths: Lengths, seed: int) -> None:
    drawn = lengths.draw(50, np.random.default_rng(seed))
    assert drawn.dtype == np.int64
    assert drawn.shape == (50,)
    assert drawn.min() >= 1
    assert drawn.max() <= lengths.most
    assert np.array_equal(drawn, lengths.draw(50, np.random.default_rng(seed)))


def test_the_middle_is_what_was_asked_for() -> None:
    generator = np.random.default_rng(2)
    for text, median in (("lognormal:200,0.8", 200), ("normal:90,9", 90), ("uniform:10-30", 20)):
        drawn = Lengths.parse(text).draw(20_000, generator)
        assert np.median(drawn) == pytest.approx(median, rel=0.05)
