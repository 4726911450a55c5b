"""Shared by the tests of speculation and by other tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.grammar import Grammar, GrammarKind
from baton.sampling_params import SamplingParams
from tests.support.models import EOS

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        SEEDED, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "penalties, greedy": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.5),
    "bias": replace(SEEDED, logit_bias=((5, 4.0), (9, -50.0))),
    "limited": replace(
        SEEDED,
        allowed_token_ids=tuple(range(40, 52)),
        bad_words=(
            *((n, n + 1) for n in range(40, 51)),
            *((n, n, n) for n in range(40, 52)),
            (45,),
        ),
    ),
    "stop ids": replace(SEEDED, stop_token_ids=tuple(range(0, 200, 3)), min_tokens=9),
    "end of sequence": replace(SEEDED, logit_bias=((EOS, 6.0),), ignore_eos=False, min_tokens=4),
    "grammar": replace(
        SEEDED, grammar=Grammar(GrammarKind.REGEX, "(ab|cd|[0-9]x){5,30}"), ignore_eos=False
    ),
    "grammar, greedy, biased": replace(
        GREEDY,
        grammar=Grammar(GrammarKind.REGEX, "[a-d]{12,30}"),
        logit_bias=((66, 3.0),),
        min_tokens=15,
        ignore_eos=False,
    ),
    "top_k, min_p": replace(SEEDED, top_k=20, top_p=1.0, min_p=0.05),
}


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOS - 1, (count,), generator=generator).tolist()


PROMPTS = [some_tokens(count, seed=count) for count in (3, 16, 40, 31)]
