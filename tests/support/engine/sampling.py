"""Shared by the tests of sampling and by other tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baton.grammar import Grammar, GrammarKind
from baton.sampling_params import SamplingParams
from engine.sampling.grammar_state import pack
from engine.sampling.sampling import SampleRow

VOCAB = 24


def everything_masked() -> list[SampleRow]:
    """Each may draw token 5 or 7 alone, and is to draw neither: greedy, and with noise."""
    rows = []
    for temperature in (0.0, 1.0):
        base = SamplingParams(temperature=temperature, seed=3)
        allowed = replace(base, allowed_token_ids=(5, 7))
        bits = np.isin(np.arange(VOCAB), (5, 7))
        strict = replace(base, grammar=Grammar(GrammarKind.REGEX, "any"))
        rows += [
            SampleRow(replace(allowed, min_tokens=2), [1], 1, (5, 7)),
            SampleRow(replace(allowed, bad_words=((9, 5), (7,))), [1, 9], 1, ()),
            SampleRow(replace(strict, bad_words=((5,), (7,))), [1], 1, (), mask=pack(bits)),
        ]
    return rows
