"""LiteLLM, with the `openai/` provider."""

from __future__ import annotations

import json

import litellm
from checks import HELLO, MODEL, RESPONSE_FORMAT, TOOLS, URL, run, same


def ask(**more: object) -> litellm.ModelResponse:
    settings = {"model": f"openai/{MODEL}", "max_tokens": 16, "temperature": 0, **more}
    return litellm.completion(
        messages=HELLO, api_base=f"{URL}/v1", api_key="none", num_retries=0, **settings
    )


def chat() -> None:
    same(ask().usage.completion_tokens, 16)


def stream() -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
    same(text, ask().choices[0].message.content)


def errors() -> None:
    for more, kind in (
        ({"model": "openai/none"}, litellm.NotFoundError),
        ({"temperature": 9}, litellm.BadRequestError),
    ):
        try:
            ask(**more)
        except kind:
            continue
        raise AssertionError(f"{more} was answered")


def json_schema() -> None:
    answer = ask(response_format=RESPONSE_FORMAT, max_tokens=128)
    same(list(json.loads(answer.choices[0].message.content)), ["colour"])


def tools() -> None:
    answer = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=128)
    same([call.function.name for call in answer.choices[0].message.tool_calls], ["paint"])


def logprobs() -> None:
    answer = ask(logprobs=True, top_logprobs=2, max_tokens=4)
    same(len(answer.choices[0].logprobs.content), 4)


def reasoning() -> None:
    """A model that does not reason has none, and takes the field all the same."""
    answer = ask(reasoning_effort="low", allowed_openai_params=["reasoning_effort"])
    details = answer.usage.completion_tokens_details
    text = getattr(answer.choices[0].message, "reasoning_content", None)
    same(bool(text), (details.reasoning_tokens or 0) > 0)


def anthropic_messages() -> None:
    """`/v1/messages` through the `anthropic/` provider."""
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        messages=HELLO,
        api_base=URL,
        api_key="none",
        temperature=0,
        max_tokens=16,
        num_retries=0,
    )
    same(answer.usage.completion_tokens, 16)


run(
    {
        "chat": chat,
        "stream": stream,
        "errors": errors,
        "json_schema": json_schema,
        "tools": tools,
        "logprobs": logprobs,
        "reasoning": reasoning,
        "messages": anthropic_messages,
    }
)
