"""Anthropic's Python client."""

from __future__ import annotations

import json

import anthropic
from checks import DEADLINE_S, HELLO, MODEL, SCHEMA, URL, is_read_again, run, same

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=DEADLINE_S)
ask = client.messages.create
TOOLS = [{"name": "paint", "description": "Paint the wall in a colour.", "input_schema": SCHEMA}]
GREEDY = {"temperature": 0}
"""The client has no parameter for it."""
LONG = "You answer in one short sentence. " * 24


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def message() -> None:
    answer = ask(model=MODEL, messages=HELLO, max_tokens=16, extra_body=GREEDY)
    same((answer.stop_reason, answer.usage.output_tokens), ("max_tokens", 16))


def stream() -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "extra_body": GREEDY}
    with client.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    same(text, text_of(ask(**asked)))
    same(final.usage.output_tokens, 16)


def errors() -> None:
    for more, kind in (
        ({"model": "none"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
    ):
        try:
            ask(**{"model": MODEL, "messages": HELLO, "max_tokens": 4, **more})
        except kind as error:
            same(error.body["type"], "error")
        else:
            raise AssertionError(f"{more} was answered")


def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system=LONG)
    answer = ask(model=MODEL, messages=HELLO, system=LONG, max_tokens=1)
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    same(counted.input_tokens, usage.input_tokens + cached)


def cache_control() -> None:
    """The tokens that are read, written and neither add up."""
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    totals = set()

    def cached_tokens() -> int:
        usage = ask(model=MODEL, messages=HELLO, system=system, max_tokens=1).usage
        read: int = usage.cache_read_input_tokens
        totals.add(usage.input_tokens + read + usage.cache_creation_input_tokens)
        return read

    same(is_read_again(cached_tokens), True)
    same(len(totals), 1)


def thinking() -> None:
    """A model that does not reason answers as it does without."""
    answer = ask(
        model=MODEL,
        messages=HELLO,
        max_tokens=1100,
        stop_sequences=[".", "\n"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    kinds = [block.type for block in answer.content]
    same(kinds in (["text"], ["thinking"], ["thinking", "text"]), True)


def tools() -> None:
    answer = ask(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=128
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    same({call.name for call in calls}, {"paint"})
    same([list(call.input) for call in calls], [["colour"]] * len(calls))
    same(answer.stop_reason, "tool_use")


def tools_streamed() -> None:
    choice = {"type": "tool", "name": "paint", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=128
    ) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    (call,) = (block for block in final.content if block.type == "tool_use")
    same(json.loads("".join(pieces)), call.input)


def prefill() -> None:
    """The answer goes on where the last message of the assistant ends."""
    turns = [*HELLO, {"role": "assistant", "content": "Red, orange and"}]
    answer = ask(model=MODEL, messages=turns, max_tokens=4, extra_body=GREEDY)
    same(answer.usage.output_tokens > 0, True)


run(
    {
        "message": message,
        "stream": stream,
        "errors": errors,
        "count_tokens": count_tokens,
        "cache_control": cache_control,
        "thinking": thinking,
        "tools": tools,
        "tools streamed": tools_streamed,
        "prefill": prefill,
    }
)
