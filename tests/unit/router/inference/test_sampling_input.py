"""What a request asks of the draws, checked before it is placed."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling_params import SamplingParams
from router.inference.sampling_input import (
    MAX_ALLOWED,
    MAX_SCORES,
    SamplingInput,
    check_scores,
    final_sampling,
    scored_tokens,
)

EOS = 9


def checked(**given: Any) -> SamplingParams:
    return final_sampling(
        SamplingInput(**given),
        prompt_tokens=3,
        context_length=100,
        vocab_size=50,
        default_max_tokens=20,
        eos_ids=(EOS,),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"allowed_token_ids": (4, EOS), "min_tokens": 1, "stop_token_ids": (4, 5)},
        {"allowed_token_ids": (4, 5), "bad_words": ((4,), (5,))},
        {"allowed_token_ids": (4, EOS), "bad_words": ((4,),), "min_tokens": 2},
    ],
)
def test_what_forbids_all_that_is_allowed_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="all of them are forbidden") as caught:
        checked(**given)
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": (EOS,)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": (4, EOS), "min_tokens": 1},
        {"allowed_token_ids": (4, 5), "bad_words": ((4,), (4, 5))},
        {"bad_words": ((4,),), "min_tokens": 3},
    ],
)
def test_what_leaves_something_is_not(given: dict[str, Any]) -> None:
    assert checked(**given).allowed_token_ids == given.get("allowed_token_ids", ())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"logit_bias": {"7": 1.0, "seven": 1.0}}, '"seven" is not one'),
        ({"logit_bias": {"x" * 500: 1.0}}, "xxx…"),
        ({"logit_bias": {"\ud800": 1.0}}, r'"\ud800" is not one'),
        ({"logit_bias": {"7": 1.0, "8": 101}}, 'that of "8" is not'),
        ({"logit_bias": {"7": 1.0, "8": "1"}}, 'that of "8" is not'),
        ({"logit_bias": {"7": 1.0, "50": 1.0}}, "between 0 and 49, and 50 is not"),
        ({"stop_token_ids": (4, 99)}, "between 0 and 49, and 99 is not"),
        ({"allowed_token_ids": (-1,)}, "between 0 and 49, and -1 is not"),
        ({"stop_token_ids": (4, 10**5000)}, "a number of more than 64 bits is not"),
    ],
)
def test_errors_name_what_is_wrong(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(**given)
    assert caught.value.param == next(iter(given))
    assert named in caught.value.message
    assert len(caught.value.message) < 200


def scored(prompt: int = 10, choices: int = 1, **fields: Any) -> tuple[int, SamplingParams, int]:
    sampling = final_sampling(
        SamplingInput(**fields),
        prompt_tokens=prompt,
        context_length=1 << 20,
        vocab_size=50,
        default_max_tokens=20,
    )
    return prompt, sampling, choices


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([scored(8000, prompt_logprobs=20, max_tokens=1)] * 5, "prompt_logprobs"),
        ([scored(8000, 30, prompt_logprobs=3, max_tokens=1)], "prompt_logprobs"),
        ([scored(choices=128, logprobs=20, max_tokens=512)], "logprobs"),
    ],
)
def test_log_probabilities_are_bounded(
    requests: list[tuple[int, SamplingParams, int]], param: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SCORES} are possible") as found:
        check_scores(requests, MAX_SCORES)
    assert found.value.param == param


def test_log_probabilities_within_the_bound() -> None:
    check_scores([scored(8000, prompt_logprobs=20, max_tokens=1)] * 4, MAX_SCORES)
    check_scores([scored(choices=8, logprobs=20, max_tokens=4000)], MAX_SCORES)
    check_scores([scored(choices=128, max_tokens=8000)] * 128, MAX_SCORES)


def test_the_longest_scored_answer() -> None:
    assert scored_tokens(SamplingInput(), 128, MAX_SCORES) is None
    limit = scored_tokens(SamplingInput(logprobs=20), 16, MAX_SCORES)
    assert limit is not None
    check_scores([scored(choices=16, logprobs=20, max_tokens=limit)], MAX_SCORES)
    with pytest.raises(InvalidRequest):
        check_scores([scored(choices=16, logprobs=20, max_tokens=limit + 1)], MAX_SCORES)


def test_allowed_ids_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ALLOWED} ids"):
        checked(allowed_token_ids=(1,) * (MAX_ALLOWED + 1))
