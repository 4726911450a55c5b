"""Bodies that are served, most of them: what an API's description alone does not lead to.

The fields of chats say "an object" or "a string" where a schema, a grammar or a turn of a
conversation belongs, and a request that gets one of many fields wrong is refused as a whole.
"""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import BaseModel

from router.batches.line import ENDPOINTS
from router.batches.protocol import CreateBatchRequest
from router.console.what_if import WhatIfRequest
from router.embeddings.protocol import EmbeddingsRequest
from router.messages.protocol import CountTokensRequest, MessagesRequest
from router.native.protocol import BatchGenerateRequest, GenerateRequest
from router.openai.protocol import ChatCompletionRequest, CompletionRequest
from router.openai.tokenize_api import DetokenizeRequest, TokenizeRequest
from router.prefixes.protocol import PinRequest
from router.responses.protocol import ResponsesRequest
from router.usage.api import FeedbackRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/generate": GenerateRequest,
    "/v1/generate/batch": BatchGenerateRequest,
    "/v1/cache/prefixes": PinRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/batches": CreateBatchRequest,
    "/v1/feedback": FeedbackRequest,
    "/console/what-if": WhatIfRequest,
}
"""The models of all bodies of JSON that clients and operators send to POST endpoints."""

_LONG = "You are a helpful assistant. " * 6
_SCHEMA = {
    "type": "object",
    "properties": {"color": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 2]}},
    "required": ["color"],
}
_TAG = {
    "structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
_FUNCTION = {"name": "paint", "description": "Paint a wall.", "parameters": _SCHEMA}
_EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "paint", "arguments": '{"color": "red"}'},
}
_TURNS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": _LONG}, {"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": _LONG, "cache_control": _EPHEMERAL}]}],
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"},
        {"role": "user", "content": "ü 😀"},
    ],
    [
        {"role": "user", "name": "alice", "content": "Hi"},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "function_call": {"name": "a.b", "arguments": '{"a": '}},
        {"role": "function", "name": "a.b", "content": [{"type": "output_text", "text": "x"}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Go"},
    ],
)
_BLOCKS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": _LONG, "cache_control": _EPHEMERAL}]}],
    [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "2 and 2", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "paint", "input": {"color": "red"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}],
        },
    ],
)
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CHOICES = ("none", "auto", "required", {"type": "function", "function": {"name": "paint"}})
_METADATA: tuple[dict[str, str], ...] = (
    {"agent": "a", "run_id": "1"},
    {"agent": "x" * 600},
    {"a": "b"},
    {},
)
_THINKING = (
    {"type": "enabled", "budget_tokens": 1024},
    {"type": "enabled", "budget_tokens": 2},
    {"type": "disabled"},
    {"type": "adaptive"},
)
_FORMATS = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True}},
    {"type": "structural_tag", **_TAG},
)
_GBNF, _LARK = 'root ::= "a" | [b-c]', 'start: "x" | /y{2}/'
_WORDS: tuple[Any, ...] = (["a"], ["a", " the", "ü"], [])
_IDS: tuple[Any, ...] = ([5], [5, 6, 7], [])
FIELDS: dict[str, tuple[Any, ...]] = {
    # Prompts
    "messages": _TURNS,
    "prompt": ("Hello", _LONG, "ü 😀"),
    "prompts": (["Hello"], ["Hello", _LONG]),
    "input": ("Hello", _LONG),
    "instructions": ("Be brief.",),
    "system": ("Be brief.", [{"type": "text", "text": _LONG, "cache_control": _EPHEMERAL}]),
    "tokens": ([5], [5, 6, 7]),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "add_special_tokens": (True, False),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"a": [1]}),
    "truncate_prompt_tokens": (1, 4, -1),
    "echo": (True, False),
    "return_token_strs": (True, False),
    # What is generated
    "max_tokens": (1, 2, 4),
    "max_completion_tokens": (1, 4),
    "max_output_tokens": (1, 4),
    "min_tokens": (0, 1),
    "ignore_eos": (True, False),
    "n": (1, 2),
    "best_of": (1, 2),
    "stop": ("a", ["b", "c"]),
    "stop_sequences": (["a"],),
    "stop_token_ids": _IDS,
    "bad_words": _WORDS,
    "allowed_token_ids": _IDS,
    "logit_bias": ({"5": 1}, {"6": -100.0}, {}),
    "temperature": (0, 0.7, 1.5),
    "top_p": (1, 0.5),
    "top_k": (1, 40, -1),
    "min_p": (0, 0.1),
    "seed": (0, 7, -(2**63)),
    "presence_penalty": (0, 1, -2),
    "frequency_penalty": (0, 1.5),
    "repetition_penalty": (1, 1.2),
    "optimization": ("none", "basic", "full"),
    # What the answer contains
    "stream": (True, False),
    "stream_options": ({"include_usage": True, "continuous_usage_stats": True}, {}),
    "logprobs": (True, 2),
    "top_logprobs": (0, 3),
    "prompt_logprobs": (0, 2),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
    "return_token_ids": (True, False),
    "encoding_format": ("float", "base64"),
    "dimensions": (1, 4),
    "store": (False, True),
    "user": ("u",),
    "metadata": _METADATA,
    "priority": (0, 5, -1),
    # Structured output
    "response_format": _FORMATS,
    "text": ({"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
    "guided_json": (_SCHEMA, '{"type": "object"}', {"type": "nonsense"}),
    "guided_regex": ("[ab]{1,3}", "a+", "("),
    "guided_choice": (["red", "blue"], ["ü"]),
    "guided_grammar": (_GBNF, _LARK),
    "structural_tag": (_TAG,),
    "structured_outputs": (
        {"regex": "[ab]{1,3}"},
        {"choice": ["red", "blue"]},
        {"json": _SCHEMA},
        {"grammar": _LARK},
        {"json_object": True},
        {"structural_tag": _TAG},
    ),
    "regex": ("[ab]{1,3}",),
    "ebnf": (_GBNF,),
    "json_schema": (_SCHEMA, '{"type": "object"}'),
    # Tools and reasoning
    "tools": (_TOOLS,),
    "tool_choice": _CHOICES,
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "max"),
    "output_config": (
        {"effort": "xhigh"},
        {"format": {"type": "json_schema", "schema": _SCHEMA}},
    ),
    "output_format": ({"type": "json_schema", "schema": _SCHEMA},),
    "reasoning": ({"effort": "low"}, {"effort": "none"}),
    "enable_thinking": (True, False),
    "thinking": _THINKING,
    "thinking_token_budget": (0, 2, -1),
    "include_reasoning": (True, False),
    # Caches
    "cache_control": ({"type": "ephemeral"}, _EPHEMERAL),
    "prompt_cache_key": ("a", "ü" * 200),
    "prompt_cache_retention": ("24h", "in_memory"),
    "ttl": (1, 60, 86400),
    "name": ("a", ""),
    # Others
    "input_file_id": ("file-1",),
    "endpoint": ("/v1/chat/completions", "/v1/embeddings"),
    "completion_window": ("24h", "90s", "1d"),
    "output_expires_after": ({"anchor": "created_at", "seconds": 3600},),
    "id": ("chatcmpl-1",),
    "success": (True, False),
    "score": (0, 0.5, 1),
    "comment": ("good", ""),
    "prefill": (0, 1),
    "decode": (1, 2),
    "rate": (0.5, 2),
}
"""Values of every field but ``model``. Those of another API's field of the same name come below."""
_OF_ANTHROPIC: dict[str, tuple[Any, ...]] = {
    "messages": _BLOCKS,
    "tools": ([{"name": "paint", "input_schema": _SCHEMA, "cache_control": _EPHEMERAL}],),
    "tool_choice": ({"type": "any"}, {"type": "tool", "name": "paint"}, {"type": "none"}),
}
_OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "tools": ([{"type": "function", **_FUNCTION}],),
    "tool_choice": ("none", "auto", "required", {"type": "function", "name": "paint"}),
    "input": ("Hello", _TURNS[0], _TURNS[1]),
}
_OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/messages": _OF_ANTHROPIC,
    "/v1/messages/count_tokens": _OF_ANTHROPIC,
    "/v1/responses": _OF_RESPONSES,
    "/v1/completions": {"prompt": ("Hello", ["Hello", _LONG], [5, 6], [[5], [6, 7]])},
    "/v1/cache/prefixes": {"prompt": (_LONG, _LONG + "Hi", list(range(5, 60)))},
    "/v1/embeddings": {"input": ("Hello", ["Hello", "ü"], [5, 6], [[5], [6]])},
}
_ONE_OF = {"/v1/cache/prefixes": ("prompt", "messages"), "/tokenize": ("prompt", "messages")}
"""Groups of fields; one field of each group is required."""
_BOUNDED = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The first of these that a body may have keeps its answer short."""
_SAME_ENDPOINT, _BAD_LINES = 0.98, 0.03
"""Shares of the lines of a batch."""


def values_of(path: str, name: str) -> tuple[Any, ...]:
    """Values of a field of an endpoint's body."""
    return _OWN.get(path, {}).get(name) or FIELDS[name]


def plausible_body(dice: random.Random, path: str, model: str) -> dict[str, Any]:
    """A body for one of ``BODIES``: what it requires, and up to four fields that it may have."""
    fields = BODIES[path].model_fields
    chosen = [name for name, field in fields.items() if field.is_required()]
    chosen += [dice.choice(_ONE_OF[path])] if path in _ONE_OF else []
    chosen += [name for name in _BOUNDED if name in fields][:1]
    excluded = (*chosen, *_ONE_OF.get(path, ()), "model")
    others = [name for name in fields if name not in excluded]
    chosen += dice.sample(others, min(len(others), dice.randrange(5)))
    body = {name: dice.choice(values_of(path, name)) for name in chosen if name != "model"}
    return {**({"model": model} if "model" in fields else {}), **body}


def batch_file(dice: random.Random, model: str) -> bytes:
    """The input file of a batch. Most of its lines are valid, and most have the same endpoint."""
    endpoint = dice.choice(ENDPOINTS)
    lines = []
    for number in range(dice.randrange(1, 20)):
        url = endpoint if dice.random() < _SAME_ENDPOINT else dice.choice(ENDPOINTS)
        body = plausible_body(dice, url, model)
        line: dict[str, Any] = {"custom_id": f"{number}", "method": "POST", "url": url}
        if dice.random() < _BAD_LINES:
            line[dice.choice((*line, "body", "more"))] = dice.choice((None, "", 1, [], {}, _LONG))
        lines.append(json.dumps({"body": body, **line}).encode())
    return dice.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)
