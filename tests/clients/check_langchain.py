"""LangChain's client of OpenAI's API."""

from __future__ import annotations

import openai
from checks import HELLO, MODEL, RESPONSE_FORMAT, SCHEMA, TOOLS, URL, run, same
from langchain_openai import ChatOpenAI

QUESTION = HELLO[0]["content"]


def model(**more: object) -> ChatOpenAI:
    settings = {"max_tokens": 16, "temperature": 0, "max_retries": 0, "timeout": 120, **more}
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, **settings)


def chat() -> None:
    answer = model().invoke(QUESTION)
    same(answer.usage_metadata["output_tokens"], 16)


def stream() -> None:
    text = "".join(chunk.content for chunk in model().stream(QUESTION))
    same(text, model().invoke(QUESTION).content)


def many() -> None:
    same(len(model().batch([QUESTION] * 3)), 3)


def errors() -> None:
    try:
        model(temperature=9).invoke(QUESTION)
    except openai.BadRequestError:
        return
    raise AssertionError("a temperature of 9 was taken")


def json_schema() -> None:
    schema = {"title": "colour", "description": "A colour.", **SCHEMA}
    bound = model(max_tokens=64).with_structured_output(schema, method="json_schema", strict=True)
    same(list(bound.invoke(QUESTION)), list(RESPONSE_FORMAT["json_schema"]["schema"]["required"]))


def tools() -> None:
    bound = model(max_tokens=128).bind_tools(
        TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    answer = bound.invoke(QUESTION)
    same([call["name"] for call in answer.tool_calls], ["paint"])


def logprobs() -> None:
    answer = model(max_tokens=4, logprobs=True, top_logprobs=2).invoke(QUESTION)
    same(len(answer.response_metadata["logprobs"]["content"]), 4)


def usage_streamed() -> None:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    same([one["output_tokens"] for one in told], [16])


def responses() -> None:
    answer = model(use_responses_api=True).invoke(QUESTION)
    same((answer.usage_metadata["output_tokens"], bool(answer.text)), (16, True))


run(
    {
        "chat": chat,
        "stream": stream,
        "batch": many,
        "errors": errors,
        "json_schema": json_schema,
        "tools": tools,
        "logprobs": logprobs,
        "usage streamed": usage_streamed,
        "responses": responses,
    }
)
