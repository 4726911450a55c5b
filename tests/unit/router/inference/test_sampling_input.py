"""What a request asks of the draws, checked before it is placed."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling_params import SamplingParams
from router.inference.sampling_input import SamplingInput, final_sampling

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
