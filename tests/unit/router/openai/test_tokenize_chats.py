"""``/tokenize`` of chats gives the ids that Hugging Face transformers gives."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import EOS, TEMPLATE, Front, make_front, tiny_backend
from tests.support.router.http_app import check_error, post

BOS = "<|im_start|>"
TRIMS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TAKES_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + TEMPLATE
)
TEMPLATES = {"plain": TEMPLATE, "trims": TRIMS, "tools": TAKES_TOOLS}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße aus  Köln "},
    {"role": "assistant", "content": "the quick brown \n"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """The tiny one, which begins a text with a special token."""
    found = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    found.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, found.token_to_id(BOS))]
    )
    return found


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": BOS, "eos_token": EOS})


def front_of(name: str) -> Front:
    front = make_front(context=4096)
    eos = backend().token_to_id(EOS)
    assert eos is not None
    front.tokenizer = Tokenizer(backend(), eos_ids=[eos], chat_template=template_of(name))
    return front


@functools.cache
def reference(name: str) -> Any:
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizers.Tokenizer.from_str(backend().to_str()),
        bos_token=BOS,
        eos_token=EOS,
        chat_template=TEMPLATES[name],
    )


def expected(name: str, tools: Any, *, prompt: bool, open_end: bool, special: bool) -> list[int]:
    theirs = reference(name)
    text = theirs.apply_chat_template(
        TALK,
        tools=tools,
        tokenize=False,
        add_generation_prompt=prompt,
        continue_final_message=open_end,
    )
    ids: list[int] = theirs(text, add_special_tokens=special)["input_ids"]
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
async def test_all_combinations(name: str) -> None:
    front = front_of(name)
    tools = TOOLS if name == "tools" else None
    seen = set()
    for prompt, open_end, special in itertools.product((False, True), repeat=3):
        if prompt and open_end:
            continue
        asked = {
            "messages": TALK,
            "tools": tools,
            "add_generation_prompt": prompt,
            "continue_final_message": open_end,
            "add_special_tokens": special,
        }
        answer = (await post(front, "/tokenize", asked)).json()
        assert answer["tokens"] == expected(
            name, tools, prompt=prompt, open_end=open_end, special=special
        )
        seen.add(tuple(answer["tokens"]))
    assert len(seen) == 6, "every combination has ids of its own"


async def test_defaults_are_those_of_a_chat() -> None:
    front = front_of("trims")
    answer = (await post(front, "/tokenize", {"messages": TALK})).json()
    assert answer["tokens"] == expected("trims", None, prompt=True, open_end=False, special=False)
    asked = {"messages": TALK, "continue_final_message": True}
    opened = (await post(front, "/tokenize", asked)).json()
    assert opened["tokens"] == expected("trims", None, prompt=False, open_end=True, special=False)


async def test_a_chat_that_continues_has_the_same_prompt() -> None:
    front = front_of("plain")
    asked: dict[str, Any] = {"messages": TALK, "continue_final_message": True}
    answer = (await post(front, "/tokenize", asked)).json()
    await post(front, "/v1/chat/completions", {"model": "tiny", "max_tokens": 1, **asked})
    assert front.dispatcher.requests[0].prompt_ids == tuple(answer["tokens"])


async def test_variables_of_the_template() -> None:
    front = front_of("plain")
    asked = {"messages": TALK, "chat_template_kwargs": {"eos_token": "unused"}}
    assert (await post(front, "/tokenize", asked)).status_code == 200
    bad = {"messages": TALK, "chat_template_kwargs": {"messages": []}}
    check_error(await post(front, "/tokenize", bad), 400, "chat_template_kwargs")


async def test_an_open_message_gets_no_beginning_of_another() -> None:
    asked = {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True}
    check_error(await post(front_of("plain"), "/tokenize", asked), 400, "continue_final_message")
    with pytest.raises(ValueError, match="not compatible"):
        expected("plain", None, prompt=True, open_end=True, special=False)
