"""Requests that a worker refuses before it takes any resource for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.reasoning import ReasoningSpan
from baton.sampling_params import SamplingParams
from tests.support.engine.fake_engine import VOCAB
from tests.support.worker.manual_worker import ManualWorker, spec_of


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> ManualWorker:
    return ManualWorker(monkeypatch)


def fields_with(number: int) -> list[dict[str, Any]]:
    """All fields of a request that have token ids, each with this one."""
    return [
        {"token_ids": (1, number, 2)},
        {"token_ids": (1, 2, number)},
        *(
            {"sampling": SamplingParams(**sampling)}
            for sampling in (
                {"stop_token_ids": (number,)},
                {"logit_bias": ((1, 0.5), (number, 1.0))},
                {"allowed_token_ids": (1, number)},
                {"bad_words": ((1,), (2, number))},
            )
        ),
        *(
            {"reasoning": replace(ReasoningSpan(((1,),)), **span)}
            for span in (
                {"ends": ((1,), (2, number))},
                {"start": (number,)},
                {"forced": (1, number)},
            )
        ),
    ]


@pytest.mark.parametrize("fields", fields_with(VOCAB), ids=str)
async def test_an_id_that_the_model_lacks_is_refused(
    world: ManualWorker, fields: dict[str, Any]
) -> None:
    spec = replace(spec_of(length=3), **fields)
    with pytest.raises(InvalidRequest, match=f"no token id {VOCAB}: its ids end at {VOCAB - 1}"):
        world.context.check_prompt(spec)


@pytest.mark.parametrize("fields", fields_with(VOCAB - 1), ids=str)
async def test_every_id_of_the_model_is_served(world: ManualWorker, fields: dict[str, Any]) -> None:
    world.context.check_prompt(replace(spec_of(length=3), **fields))
