"""What answers have besides their text: log probabilities, several choices, echoes, token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.request import GenerationRequest
from router.openai.options import MAX_CHOICES
from tests.support.router.front_fakes import (
    CONTEXT,
    EOS,
    Front,
    check_schema,
    make_front,
    sse_payloads,
)
from tests.support.router.http_app import CHAT, HELLO, PLAIN, PROMPT, check_error, post

TEXT = "Grüße 😀👩‍👧 from Paris"
ANY = {"max_tokens": 64}


def front_with(text: str = TEXT) -> Front:
    front = make_front()
    front.dispatcher.text = text
    return front


async def answer(front: Front, path: str, **fields: Any) -> dict[str, Any]:
    """A whole answer, as OpenAI's schema has it."""
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), **ANY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    kind = "ChatCompletion" if path == CHAT else "Completion"
    check_schema(body, f"Create{kind}Response")
    return body


async def chunks(front: Front, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, as OpenAI's schema has them."""
    body = {**(HELLO if path == CHAT else PROMPT), **ANY, "stream": True, **fields}
    response = await post(front, path, body)
    assert response.status_code == 200, response.text
    assert response.text.isascii()
    *payloads, last = sse_payloads(response.text)
    assert last == "[DONE]"
    events = [json.loads(payload) for payload in payloads]
    for event in events:
        kind = "ChatCompletionStream" if path == CHAT else "Completion"
        check_schema(event, f"Create{kind}Response")
    return events


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, list[Any]]:
    """The columns of a stream's ``logprobs``, one after another."""
    columns: dict[str, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index and choice["logprobs"] is not None:
                for name, column in choice["logprobs"].items():
                    columns.setdefault(name, []).extend(column or [])
    return columns


def spelled(token: str) -> bytes:
    """The bytes of a completion's token."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


# Log probabilities


async def test_the_bytes_of_chat_tokens_join_to_the_text() -> None:
    front = front_with()
    whole = await answer(front, CHAT, logprobs=True, top_logprobs=3)
    (choice,) = whole["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == TEXT
    assert choice["message"]["content"] == TEXT
    assert any("\ufffd" in token["token"] for token in content), "no character was cut in two"
    for token in content:
        assert token["logprob"] == -0.5
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.5, -2.5]
        assert token["top_logprobs"][0]["bytes"] == token["bytes"]
    assert front.dispatcher.requests[0].sampling.logprobs == 3
    events = await chunks(front, CHAT, logprobs=True, top_logprobs=3)
    assert joined(events)["content"] == content
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == TEXT


async def test_without_top_logprobs_the_token_is_all() -> None:
    front = front_with()
    whole = await answer(front, CHAT, logprobs=True)
    assert all(not t["top_logprobs"] for t in whole["choices"][0]["logprobs"]["content"])
    assert (await answer(front, CHAT))["choices"][0]["logprobs"] is None
    assert front.dispatcher.requests[-1].sampling.logprobs is None
    assert (await answer(front, PLAIN, logprobs=False))["choices"][0]["logprobs"] is None


async def test_completions_have_columns() -> None:
    front = front_with()
    whole = await answer(front, PLAIN, logprobs=2)
    logprobs = whole["choices"][0]["logprobs"]
    assert b"".join(map(spelled, logprobs["tokens"][:-1])).decode() == TEXT
    assert logprobs["tokens"][-1] == EOS, "the token that ended the answer counts"
    assert len(logprobs["tokens"]) == whole["usage"]["completion_tokens"]
    assert set(logprobs["token_logprobs"]) == {-0.5}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(TEXT)
    for token, offset in zip(logprobs["tokens"][:-1], offsets, strict=False):
        if not token.startswith("bytes:"):
            assert TEXT[offset:].startswith(token)
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == max(top.values()) == -0.5
    assert joined(await chunks(front, PLAIN, logprobs=2)) == logprobs


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_scores_too(include: bool) -> None:
    front = front_with("one two three four")
    fields = {"stop": ["o thr"], "logprobs": True, "include_stop_str_in_output": include}
    whole = await answer(front, CHAT, **fields)
    shown = "one two thr" if include else "one tw"
    assert whole["choices"][0]["message"]["content"] == shown
    content = whole["choices"][0]["logprobs"]["content"]
    spelling = b"".join(bytes(token["bytes"]) for token in content).decode()
    assert spelling.startswith(shown)
    last = bytes(content[-1]["bytes"]).decode()
    assert len(spelling) - len(last) < len(shown), "a token is scored whose text is not shown"
    assert joined(await chunks(front, CHAT, **fields))["content"] == content


# Several choices


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_n_choices_share_a_prompt(path: str) -> None:
    front = front_with()
    one = await answer(front, path)
    three = await answer(front, path, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert [{**c, "index": 0} for c in three["choices"]] == one["choices"] * 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert front.dispatcher.requests[-1].choices == 3
    assert len(front.dispatcher.requests) == 2
    usage = {"stream_options": {"include_usage": True}}
    *events, last = await chunks(front, path, n=3, **usage)
    assert last["usage"] == three["usage"]
    for index in range(3):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in own]
        assert "".join(texts) == TEXT
        assert [c["finish_reason"] for c in own][-1] == "stop"
    assert front.requests() == {("short", "ok", ""): 3}


async def test_n_of_several_prompts_are_in_their_order() -> None:
    front = front_with()
    whole = await answer(front, PLAIN, prompt=["a", "bb"], n=2, echo=True)
    assert [c["text"] for c in whole["choices"]] == [f"{p}{TEXT}" for p in ("a", "a", "bb", "bb")]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]


async def test_the_likeliest_of_several_is_returned() -> None:
    front = front_with()
    scripted = front.dispatcher.speak

    async def script(request: GenerationRequest):  # type: ignore[no-untyped-def]
        assert request.sampling.logprobs == 0
        async for delta in scripted(request):
            likely = {0: -3.0, 1: -1.0, 2: -2.0}[delta.choice]
            for token in delta.scored:
                object.__setattr__(token.logprobs, "logprob", likely)
            object.__setattr__(delta, "text", f"{delta.choice}" if delta.text else "")
            yield delta

    front.dispatcher.script = script
    whole = await answer(front, PLAIN, n=2, best_of=3)
    assert [choice["text"][0] for choice in whole["choices"]] == ["1", "2"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    one = await answer(front_with(), PLAIN)
    assert whole["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


# The prompt


async def test_an_echo_of_text_and_of_token_ids() -> None:
    front = front_with()
    ids = list(front.tokenizer.encode("Köln 😀"))
    for prompt in ("Köln 😀", ids):
        assert (await answer(front, PLAIN, prompt=prompt, echo=True))["choices"][0]["text"] == (
            "Köln 😀" + TEXT
        )
        events = await chunks(front, PLAIN, prompt=prompt, echo=True)
        assert "".join(e["choices"][0]["text"] for e in events) == "Köln 😀" + TEXT
        assert events[0]["choices"][0]["text"].startswith("Köln 😀")
    special = [*ids, *front.tokenizer.eos_ids, *ids]
    assert (await answer(front, PLAIN, prompt=special, echo=True))["choices"][0][
        "text"
    ] == f"Köln 😀{EOS}Köln 😀{TEXT}"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_scores(stream: bool) -> None:
    """As lm-eval's local-completions asks for it."""
    front = front_with()
    ids = list(front.tokenizer.encode("Köln 😀 and more"))
    fields: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        logprobs = joined(await chunks(front, PLAIN, **fields))
    else:
        logprobs = (await answer(front, PLAIN, **fields))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert b"".join(map(spelled, logprobs["tokens"][:-1])).decode() == "Köln 😀 and more"
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.5] * len(ids)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top[token] == max(top.values())
    assert logprobs["text_offset"][-1] == len("Köln 😀 and more")
    sampling = front.dispatcher.requests[-1].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone(stream: bool) -> None:
    front = front_with()
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        events = await chunks(front, PLAIN, **fields)
        logprobs, text = joined(events), "".join(e["choices"][0]["text"] for e in events)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        whole = await answer(front, PLAIN, **fields)
        logprobs, text = whole["choices"][0]["logprobs"], whole["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["choices"][0]["finish_reason"] == "length"
    assert text == "Hello"
    assert "".join(logprobs["tokens"]) == "Hello"
    check_error(await post(front, PLAIN, {**PROMPT, "max_tokens": 0}), 400, "max_tokens")


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_prompt_logprobs_by_token_id(path: str) -> None:
    front = front_with()
    whole = await answer(front, path, prompt_logprobs=2, return_token_ids=True)
    where = whole if path == CHAT else whole["choices"][0]
    ids = where["prompt_token_ids"]
    assert where["prompt_logprobs"][0] is None
    for token, entry in zip(ids[1:], where["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["logprob"] == -0.5
        assert entry[str(token)]["rank"] == 1
        assert len(entry) == 2
    check_error(
        await post(
            front,
            path,
            {**(HELLO if path == CHAT else PROMPT), "prompt_logprobs": 1} | {"stream": True},
        ),
        400,
        "prompt_logprobs",
    )


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "World"]])
async def test_every_choice_of_a_completion_has_its_prompt_logprobs(prompt: Any) -> None:
    front = front_with()
    whole = await answer(front, PLAIN, prompt=prompt, n=2, prompt_logprobs=1, return_token_ids=True)
    assert len(whole["choices"]) == 2 * (1 if prompt == "Hello" else 2)
    for choice in whole["choices"]:
        scored = [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]]
        assert scored == [str(token) for token in choice["prompt_token_ids"][1:]]


# Token ids, special tokens, usage


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_token_ids_are_returned(path: str) -> None:
    front = front_with()
    whole = await answer(front, path, return_token_ids=True)
    prompt = list(front.dispatcher.requests[0].prompt_ids)
    tokens = [*front.tokenizer.encode(TEXT), *front.tokenizer.eos_ids]
    assert (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == tokens
    events = await chunks(front, path, return_token_ids=True)
    assert (events[0] if path == CHAT else events[0]["choices"][0])["prompt_token_ids"] == prompt
    told = [t for e in events for t in e["choices"][0].get("token_ids", [])]
    assert told == tokens


async def test_special_tokens_are_shown_where_they_are_wanted() -> None:
    front = front_with("a<|im_start|>b")
    assert (await answer(front, PLAIN))["choices"][0]["text"] == "ab"
    shown = await answer(front, PLAIN, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|im_start|>b"


async def test_usage_in_every_chunk() -> None:
    front = front_with()
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await chunks(front, CHAT, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[:2] == [0, 1], "the chunk with the role counts no token"
    assert events[0]["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert events[-1]["usage"] == last["usage"]


# The way to the prompt


async def test_only_the_end_of_a_prompt_is_taken() -> None:
    front = front_with()
    for prompt, most, kept in (
        ([5, 6, 7, 8], 2, (7, 8)),
        ([5, 6], 9, (5, 6)),
        ([5] * 2 * CONTEXT, -1, (5,) * (CONTEXT - 64)),
    ):
        await answer(front, PLAIN, prompt=prompt, truncate_prompt_tokens=most)
        assert front.dispatcher.requests[-1].prompt_ids == kept
    bad = {**PROMPT, "truncate_prompt_tokens": 0}
    check_error(await post(front, PLAIN, bad), 400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_the_error_names_the_key_of_a_bad_bias(path: str) -> None:
    asked = {**(HELLO if path == CHAT else PROMPT), "logit_bias": {"7": 1, "seven": 1}}
    error = check_error(await post(make_front(), path, asked), 400, "logit_bias")
    assert '"seven"' in error["message"]


async def test_words_can_be_forbidden() -> None:
    front = front_with()
    await answer(front, PLAIN, bad_words=["a", " Constantinople "])
    encode = front.tokenizer.encode
    runs = {encode(text) for text in ("a", " a", "Constantinople", " Constantinople")}
    assert set(front.dispatcher.requests[-1].sampling.bad_words) == runs
    assert max(map(len, runs)) > 2
    for word in ("", " ", "x" * 1000):
        check_error(await post(front, PLAIN, {**PROMPT, "bad_words": [word]}), 400, "bad_words")


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (PLAIN, PROMPT)])
async def test_some_tokens_alone_can_be_allowed(path: str, body: dict[str, Any]) -> None:
    front = front_with()
    await answer(front, path, allowed_token_ids=[7, 5, 7])
    assert front.dispatcher.requests[-1].sampling.allowed_token_ids == (5, 7)
    bodies: list[dict[str, Any]] = [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [10**6]},
        {"allowed_token_ids": [5], "guided_regex": "a"},
    ]
    for bad in bodies:
        check_error(await post(front, path, {**body, **bad}), 400, "allowed_token_ids")


async def prompt_of(**fields: Any) -> str:
    front = make_front(
        template="{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ tail }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    response = await post(front, CHAT, {**HELLO, **fields})
    assert response.status_code == 200, response.text
    return front.tokenizer.decode(front.dispatcher.requests[0].prompt_ids)


async def test_the_template_takes_more_variables() -> None:
    assert await prompt_of() == "[user]Hello[assistant]"
    assert await prompt_of(add_generation_prompt=False) == "[user]Hello"
    told = await prompt_of(chat_template_kwargs={"tail": "!"})
    assert told == "[user]Hello![assistant]"
    messages = [*HELLO["messages"], {"role": "assistant", "content": "I say: "}]
    kwargs = {"tail": "!"}
    going_on = await prompt_of(
        messages=messages, continue_final_message=True, chat_template_kwargs=kwargs
    )
    assert going_on == "[user]Hello![assistant]I say: ", "the template keeps the space"


BAD = [
    (CHAT, "top_logprobs", {"top_logprobs": 2}),
    (CHAT, "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    (CHAT, "top_logprobs", {"top_logprobs": -1, "logprobs": True}),
    (CHAT, "logprobs", {"logprobs": 3}),
    (PLAIN, "logprobs", {"logprobs": 21}),
    (PLAIN, "logprobs", {"logprobs": -1}),
    (PLAIN, "logprobs", {"logprobs": "1"}),
    (CHAT, "n", {"n": 0}),
    (PLAIN, "n", {"n": MAX_CHOICES + 1}),
    (PLAIN, "n", {"n": 1.5}),
    (PLAIN, "n", {"n": 128, "prompt": ["a"] * 9}),
    (PLAIN, "best_of", {"n": 3, "best_of": 2}),
    (PLAIN, "best_of", {"n": 2, "best_of": 3, "stream": True}),
    (PLAIN, "best_of", {"best_of": MAX_CHOICES + 1}),
    (PLAIN, "prompt_logprobs", {"prompt_logprobs": 21}),
    (CHAT, "continue_final_message", {"continue_final_message": True}
     | {"add_generation_prompt": True}),
    (CHAT, "chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    (CHAT, "chat_template_kwargs", {"chat_template_kwargs": [1]}),
    (PLAIN, "bad_words", {"bad_words": ["a"] * 200}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "fields"), BAD)
async def test_bad_values_are_named(path: str, name: str, fields: dict[str, Any]) -> None:
    front = make_front()
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), **fields})
    check_error(response, 400, name)
    assert not front.dispatcher.requests
