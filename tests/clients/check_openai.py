"""The official Python client."""

from __future__ import annotations

import json
import time

import openai
from checks import DEADLINE_S, HELLO, MODEL, RESPONSE_FORMAT, TOOLS, URL, is_read_again, run, same

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
ask = client.chat.completions.create
GREEDY = {"model": MODEL, "messages": HELLO, "temperature": 0}
"""Requests whose answers are as long as `max_tokens`: a drawn one may end sooner."""


def chat() -> None:
    answer = ask(**GREEDY, max_tokens=16)
    same(answer.usage.completion_tokens, 16)
    same(answer.choices[0].finish_reason, "length")


def stream() -> None:
    whole = ask(**GREEDY, max_tokens=16)
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
    answer = ask(**GREEDY, logprobs=True, top_logprobs=2, max_tokens=4)
    tokens = answer.choices[0].logprobs.content
    same([len(token.top_logprobs) for token in tokens], [2] * 4)


def several() -> None:
    answer = ask(model=MODEL, messages=HELLO, n=3, max_tokens=4)
    same([choice.index for choice in answer.choices], [0, 1, 2])


def usage_in_every_chunk() -> None:
    """As vLLM has it: the chunk with the role counts no token."""
    chunks = list(
        ask(
            **GREEDY,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    same((counts[0], counts[-1], counts), (0, 8, sorted(counts)))


def cached_tokens() -> None:
    """A prompt that is sent again is found in a cache, except for its last block."""
    system = {"role": "system", "content": "You answer in one short sentence. " * 24}

    def once() -> int:
        answer = ask(
            model=MODEL,
            messages=[system, *HELLO],
            max_tokens=1,
            prompt_cache_key="check-openai",
            prompt_cache_retention="24h",
        )
        cached: int = answer.usage.prompt_tokens_details.cached_tokens
        return cached

    same(is_read_again(once), True)


def reasoning() -> None:
    """A model that does not reason has none, and takes the fields all the same."""
    answer = ask(
        model=MODEL,
        messages=HELLO,
        max_tokens=32,
        reasoning_effort="low",
        extra_body={"thinking_token_budget": 8},
    )
    tokens = answer.usage.completion_tokens_details.reasoning_tokens
    text = getattr(answer.choices[0].message, "reasoning_content", None)
    same((tokens <= 8, bool(text)), (True, tokens > 0))


def extra_body() -> None:
    """Constraints by vLLM's and SGLang's names."""
    for more in (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
        {"regex": "yes|no"},
        {"ebnf": 'root ::= "yes" | "no"'},
    ):
        answer = ask(model=MODEL, messages=HELLO, max_tokens=8, extra_body=more)
        same(answer.choices[0].message.content in ("yes", "no"), True)


def continues() -> None:
    """The answer goes on in the last message, which the prompt does not close."""
    turns = [*HELLO, {"role": "assistant", "content": "Red, orange and"}]
    opened = {"continue_final_message": True, "add_generation_prompt": False}
    longer, closed = (
        ask(model=MODEL, messages=turns, max_tokens=4, extra_body=more) for more in (opened, {})
    )
    same(longer.usage.prompt_tokens < closed.usage.prompt_tokens, True)


def errors_name_the_key() -> None:
    try:
        ask(model=MODEL, messages=HELLO, logit_bias={"seven": 1})
    except openai.BadRequestError as error:
        same((error.body["param"], "seven" in error.body["message"]), ("logit_bias", True))
    else:
        raise AssertionError("a bias of no token was taken")


def responses() -> None:
    answer = client.responses.create(
        model=MODEL, input=HELLO, max_output_tokens=16, temperature=0, reasoning={"effort": "low"}
    )
    same((answer.usage.output_tokens, bool(answer.output_text)), (16, True))


def responses_streamed() -> None:
    events = list(
        client.responses.create(model=MODEL, input=HELLO, max_output_tokens=16, stream=True)
    )
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    same(events[-1].response.output_text, text)


def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["One", "Two"], dimensions=8)
    same([len(one.embedding) for one in answer.data], [8, 8])


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
        "usage in every chunk": usage_in_every_chunk,
        "cached tokens": cached_tokens,
        "reasoning": reasoning,
        "structured outputs": extra_body,
        "continue_final_message": continues,
        "errors name the key": errors_name_the_key,
        "responses": responses,
        "responses streamed": responses_streamed,
        "embeddings": embeddings,
    }
)
