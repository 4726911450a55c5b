"""The OpenAI API's requests and responses, as far as they are served.

A field that is neither served nor known to change nothing is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.dialects.tools import MessageToolCall, MessageToolCalls, ToolDefinitions
from router.http.client import Count, Int, IntLists, Ints, RequestBody, Strings
from router.inference.prompt import MAX_MESSAGES

MAX_PARTS = 2048
"""Parts of a message."""


IGNORED = frozenset(
    {
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields that clients of OpenAI and vLLM send, and that change nothing here."""
UNSERVED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "guided_whitespace_pattern": (),
    "return_tokens_as_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "vllm_xargs": (),
}
"""Known fields that would change the answer, and values of them that ask for nothing."""
_UNSERVED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
}
_UNSERVED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


class _Part(BaseModel):
    """Part of a body. Clients send back what other servers have sent them, so more is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    include_obfuscation: bool | None = None
    """Ignored: chunks are not padded."""
    include_usage: bool | None = None
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage so far (extension)."""


class SamplingFields(RequestBody):
    """What both endpoints have in common."""

    ignored = IGNORED

    model: str
    """The served model's id; see `GET /v1/models`."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    temperature: float | None = None
    """0 … 2; 0 takes the most likely token. Default 1."""
    top_p: float | None = None
    """Above 0, at most 1: keep the smallest set of tokens with this probability. Default 1."""
    top_k: Int | None = None
    """Keep this many of the most likely tokens; 0 or -1 keeps all (extension)."""
    min_p: float | None = None
    """0 … 1: keep tokens at least this fraction as likely as the most likely one (extension)."""
    seed: Int | None = None
    """Any 64-bit integer; same seed, same tokens."""
    stop: str | Strings | None = None
    """Up to 16 strings that end the answer and are not part of it."""
    stop_token_ids: Ints | None = None
    """Token ids that end the answer (extension)."""
    max_tokens: Int | None = None
    """Most tokens to generate."""
    min_tokens: Int | None = None
    """No end before this many tokens (extension)."""
    ignore_eos: bool | None = None
    """Go on past the model's end of sequence (extension)."""
    presence_penalty: float | None = None
    """-2 … 2."""
    frequency_penalty: float | None = None
    """-2 … 2."""
    repetition_penalty: float | None = None
    """0.001 … 10; 1 changes nothing (extension)."""
    metadata: dict[str, Any] | None = None
    """`agent` and `run_id` name what sends the request, for usage and the request log; other
    entries are ignored."""
    priority: Int | None = None
    """A 32-bit integer: lower ones come earlier when requests wait (extension). Default: that of
    the API key, or 0."""
    prompt_cache_key: str | None = None
    """Requests with the same key go to the same worker where possible: up to 256 characters."""
    prompt_cache_retention: str | None = None
    """`24h` keeps the cached prompt for a day, within the tenant's share of the cache; `in_memory`,
    the default, until others need the room."""
    n: Int | None = None
    """How many answers are drawn from each prompt: 1 … 128. Default 1."""
    prompt_logprobs: Int | None = None
    """Tell the log probabilities of the prompt's tokens, and those of so many of the likeliest at
    each place: 0 … 20 (extension). Not with `stream`."""
    include_stop_str_in_output: bool | None = None
    """The stop string that ends the answer is part of it (extension)."""
    skip_special_tokens: bool | None = None
    """false shows the names of special tokens in the answer (extension). Default true."""
    return_token_ids: bool | None = None
    """Tell the token ids of prompt and answers (extension)."""
    truncate_prompt_tokens: Int | None = None
    """Take the prompt's last so many tokens alone; -1: as many as fit (extension)."""
    bad_words: Strings | None = None
    """Up to 128 words that are never generated, as their tokens are at a text's start and behind a
    space (extension)."""
    allowed_token_ids: Ints | None = None
    """The token ids that alone may be generated; those that end an answer as well (extension)."""
    logit_bias: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """Token id → what is added to its logit, -100 … 100; at most 300 entries."""
    response_format: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema":
    {"name": …, "schema": …}}`: the answer is such a JSON text."""
    guided_json: Any = None
    """A JSON schema, as an object or as JSON in a string, that the answer matches (extension)."""
    guided_regex: str | None = None
    """A regular expression that the whole answer matches (extension)."""
    guided_choice: Strings | None = None
    """The answer is one of these texts (extension)."""
    guided_grammar: str | None = None
    """A grammar, in Lark or GBNF, that the answer follows (extension)."""
    structural_tag: Any = None
    """Free text in which what stands between markers matches JSON schemas, as an object or as JSON
    in a string (extension)."""
    structured_outputs: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """One of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`, as above
    (extension)."""
    regex: str | None = None
    """`guided_regex`, as SGLang calls it (extension)."""
    ebnf: str | None = None
    """`guided_grammar`, as SGLang calls it (extension)."""
    json_schema: Any = None
    """`guided_json`, as SGLang calls it (extension)."""


class ContentPart(_Part):
    type: str
    """`text` is served."""
    text: str | None = None


_Parts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class Message(_Part):
    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | _Parts | None = None
    """Text, or a list of text parts; null only beside `tool_calls`."""
    tool_calls: MessageToolCalls | None = None
    """The calls of an earlier answer."""
    tool_call_id: str | None = None
    """The call whose result a message of the role `tool` is."""
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for chat templates that take it (extension)."""
    reasoning: str | None = None
    """Another name for `reasoning_content` (extension)."""
    function_call: Any = Field(default=None, exclude=True)
    """Not supported."""
    audio: Any = Field(default=None, exclude=True)
    """Not supported."""


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED_IN_CHATS}

    messages: Messages
    """The conversation; the model's chat template is applied to it."""
    max_completion_tokens: Int | None = None
    """Another name for `max_tokens`. Default: what is left of the context."""
    logprobs: bool | None = None
    """Tell the log probability of each token: that of the raw logits, without temperature,
    penalties and biases."""
    top_logprobs: Int | None = None
    """0 … 20, with `logprobs`: tell so many of the likeliest tokens at each place."""
    add_generation_prompt: bool | None = None
    """Whether the template begins the assistant's turn (extension). Default true."""
    continue_final_message: bool | None = None
    """The answer goes on in the last message, which stays open (extension). Default false."""
    chat_template_kwargs: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """More variables for the chat template (extension)."""
    reasoning_effort: str | None = None
    """How much the model reasons: `none`, `minimal`, `low`, `medium` or `high`."""
    enable_thinking: bool | None = None
    """Whether the model reasons (extension). Default: as its chat template has it."""
    thinking: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """`{"type": "enabled", "budget_tokens": …}`, or `disabled` or `adaptive`: both fields beside
    this one, as Anthropic has them (extension)."""
    thinking_token_budget: Int | None = None
    """Maximum tokens of the reasoning, whose end is then forced; -1: any number (extension)."""
    include_reasoning: bool | None = None
    """false leaves the reasoning out of the answer, not out of the usage (extension). Default
    true."""
    tools: ToolDefinitions | None = None
    """Up to 128 functions that the model may call."""
    tool_choice: Any = Field(default=None, json_schema_extra={"type": ["string", "object", "null"]})
    """`none`, `auto` (the default), `required`, or the name of a function in OpenAI's form."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in an answer. Default true."""


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED_IN_COMPLETIONS}

    prompt: str | Strings | Ints | IntLists
    """Text, a list of texts, a list of token ids, or a list of lists of token ids."""
    logprobs: Count = None
    """Tell the log probability of each token, and those of so many of the likeliest ones: 0 … 20
    (OpenAI: 5). By the raw logits, without temperature, penalties and biases."""
    echo: bool | None = None
    """The prompt comes before the answer; with `logprobs` its tokens are scored too, and
    `max_tokens` may be 0."""
    best_of: Int | None = None
    """Draw so many answers and return the `n` with the highest mean log probability. Not with
    `stream`."""


class PromptTokensDetails(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    cached_tokens: int
    """Prompt tokens whose KV was found in a cache."""
    cache_write_tokens: int
    """Prompt tokens whose KV was computed and is retained."""


class CompletionTokensDetails(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    reasoning_tokens: int
    """Tokens of reasoning, without its markers."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


Finish = Literal["stop", "length"]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ToolCallMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall]


class _Reasoned(BaseModel):
    """The reasoning before an answer, by both names that clients know."""

    reasoning_content: str
    reasoning: str


class ReasonedMessage(_Reasoned, ChatMessage):
    pass


class ReasonedToolCallMessage(_Reasoned, ToolCallMessage):
    pass


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage | ToolCallMessage | ReasonedMessage | ReasonedToolCallMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Finish | Literal["tool_calls"]


class ChatCompletion(BaseModel):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Finish


class Completion(BaseModel):
    """The answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    """The id again, for clients that take the first model that is listed (extension)."""
    max_model_len: int
    """Most tokens of prompt and answer together (extension)."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
