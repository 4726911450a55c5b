"""What a request to ``/v1/responses`` asks for, whichever front it came by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.exchange import Exchange
from router.generation import GenerationRequest
from router.request_builder import Arrival
from router.responses.answer import Repeated, ResponsesAnswer
from router.sampling_input import SamplingInput
from router.tool_calls.prompt import Turn
from router.tool_calls.tool import ToolUse


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """Checked as far as that goes without the model."""

    turns: Sequence[Turn]
    sampling: SamplingInput
    repeated: Repeated
    priority: int | None = None
    use: ToolUse | None = None


async def begun(
    exchange: Exchange, asked: ResponseAsked, arrival_of: Callable[[str], Arrival]
) -> tuple[ResponsesAnswer, GenerationRequest, Arrival]:
    """An answer that is still empty, and what is to be generated for it.

    ``arrival_of`` takes the answer's id. Raises InvalidRequest and its kin.
    """
    answer = ResponsesAnswer(asked.repeated, exchange.builder.tool_format, asked.use)
    arrival = arrival_of(answer.id)
    built = await exchange.builder.chat(
        arrival, asked.turns, asked.sampling, asked.priority, asked.use
    )
    answer.sampled_with(built)
    return answer, built, arrival
