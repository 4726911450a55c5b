"""The official Python client."""

from __future__ import annotations

import json
import time

import openai
from checks import DEADLINE_S, HELLO, MODEL, RESPONSE_FORMAT, TOOLS, URL, run, same

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
ask = client.chat.completions.create


def chat() -> None:
    answer = ask(model=MODEL, messages=HELLO, temperature=0, max_tokens=16)
    same(answer.usage.completion_tokens, 16)
    same(answer.choices[0].finish_reason, "length")


def stream() -> None:
    whole = ask(model=MODEL, messages=HELLO, temperature=0, max_tokens=16)
    chunks = list(
        ask(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    same(text, whole.choices[0].message.content)
    same(chunks[-1].usage.completion_tokens, 16)


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4)
    same([choice.index for choice in answer.choices], [0, 1])


def errors() -> None:
    for arguments, kind in (
        ({"model": "none"}, openai.NotFoundError),
        ({"model": MODEL, "temperature": 9}, openai.BadRequestError),
    ):
        try:
            ask(messages=HELLO, **arguments)
        except kind as error:
            same(error.body["type"], "invalid_request_error")
        else:
            raise AssertionError(f"{arguments} was answered")


def models() -> None:
    same([model.id for model in client.models.list()], [MODEL])


def batch() -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    end = time.monotonic() + DEADLINE_S
    while made.status not in ("completed", "failed", "expired") and time.monotonic() < end:
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    same(made.status, "completed")
    same(json.loads(client.files.content(made.output_file_id).text)["custom_id"], "a")


def json_schema() -> None:
    answer = ask(model=MODEL, messages=HELLO, response_format=RESPONSE_FORMAT, max_tokens=128)
    same(list(json.loads(answer.choices[0].message.content)), ["colour"])


def tools() -> None:
    answer = ask(
        model=MODEL,
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=128,
    )
    (call,) = answer.choices[0].message.tool_calls
    same(call.function.name, "paint")
    same(list(json.loads(call.function.arguments)), ["colour"])


def tools_streamed() -> None:
    chunks = ask(
        model=MODEL,
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=128,
        stream=True,
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    same([call.function.name for call in calls if call.id], ["paint"])
    same(list(json.loads("".join(c.function.arguments or "" for c in calls))), ["colour"])


def logprobs() -> None:
    answer = ask(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=4)
    tokens = answer.choices[0].logprobs.content
    same([len(token.top_logprobs) for token in tokens], [2] * 4)


def several() -> None:
    answer = ask(model=MODEL, messages=HELLO, n=3, max_tokens=4)
    same([choice.index for choice in answer.choices], [0, 1, 2])


run(
    {
        "chat": chat,
        "stream": stream,
        "completions": completions,
        "errors": errors,
        "models": models,
        "batch": batch,
        "json_schema": json_schema,
        "tools": tools,
        "tools streamed": tools_streamed,
        "logprobs": logprobs,
        "n": several,
    }
)
