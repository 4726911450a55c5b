"""The supported requests and responses of the OpenAI API.

``router.http.fields`` says what becomes of other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.conversation.turns import MAX_MESSAGES
from router.dialects.tools import MAX_CALLS, MessageCustomToolCall, MessageToolCall, ToolDefinitions
from router.http.client import Count, Int, IntLists, Ints, Strings
from router.http.fields import RequestBody

MAX_PARTS = 2048
"""Maximum number of parts of a message."""


IGNORED = frozenset(
    {
        *("access_programs", "client_metadata", "early_stopping", "guided_decoding_backend"),
        *("length_penalty", "mm_processor_kwargs", "models", "moderation"),
        *("prompt_cache_options", "safety_identifier", "service_tier"),
        *("spaces_between_special_tokens", "store", "user", "verbosity"),
    }
)
"""Fields that clients of OpenAI and vLLM send, and that do not change the answer here: hints, names
of the sender, and settings of what is refused, such as beam search."""
UNSERVED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
    "return_tokens_as_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}
"""Known fields without which the client would get another answer than it asks for, with their
values that have no effect."""
_IGNORED_IN_CHATS = frozenset({"prediction", "web_search_options"})
_IGNORED_IN_COMPLETIONS = frozenset({"include_reasoning", "reasoning_effort"})
_UNSERVED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "prompt": (),
}
_UNSERVED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


class _Part(BaseModel):
    """Part of a body. Unknown fields are ignored: clients return what other servers sent."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    include_obfuscation: bool | None = None
    """Ignored: chunks are not padded."""
    include_usage: bool | None = None
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage so far (extension)."""


class SamplingFields(RequestBody):
    """The fields of both endpoints."""

    ignored = IGNORED
    parts: ClassVar[Mapping[str, type[BaseModel]]] = {"stream_options": StreamOptions}

    model: str
    """The served model's id; see `GET /v1/models`."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is generated."""
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
    """Maximum number of tokens to generate."""
    min_tokens: Int | None = None
    """Minimum number of tokens before the answer may end (extension)."""
    ignore_eos: bool | None = None
    """Continue past the model's end of sequence (extension)."""
    presence_penalty: float | None = None
    """-2 … 2. Lowers the logits of tokens that the answer already contains."""
    frequency_penalty: float | None = None
    """-2 … 2. Lowers the logits of tokens by how often the answer contains them."""
    repetition_penalty: float | None = None
    """0.001 … 10; 1 changes nothing (extension)."""
    metadata: dict[str, Any] | None = None
    """`agent` and `run_id` name the sender of the request, for usage and the request log; other
    entries are ignored."""
    priority: Int | None = None
    """A 32-bit integer: waiting requests with lower values go first (extension). Default: that of
    the API key, or 0."""
    prompt_cache_key: str | None = None
    """Requests with the same key go to the same worker where possible: up to 256 characters."""
    prompt_cache_retention: str | None = None
    """`24h` keeps the cached prompt for a day, within the tenant's share of the cache. `in_memory`,
    the default, keeps it until others need the room."""
    n: Int | None = None
    """Number of answers generated from each prompt: 1 … 128. Default 1."""
    prompt_logprobs: Int | None = None
    """Return the log probabilities of the prompt's tokens, and of this number of most likely tokens
    at each position: 0 … 20 (extension). Not with `stream`."""
    include_stop_str_in_output: bool | None = None
    """Whether the answer includes the stop string that ended it (extension)."""
    skip_special_tokens: bool | None = None
    """false shows the names of special tokens in the answer (extension). Default true."""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and answers (extension)."""
    truncate_prompt_tokens: Int | None = None
    """Keep only this number of tokens at the prompt's end; -1: the maximum that fits (extension).
    """
    bad_words: Strings | None = None
    """Up to 128 words that are never generated, in their spellings at a text's start and after a
    space (extension)."""
    allowed_token_ids: Ints | None = None
    """The only token ids that may be generated, including those that end an answer (extension)."""
    logit_bias: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """Maps token ids to a value that is added to their logits, -100 … 100; at most 300 entries."""
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
    """Free text whose parts between markers match JSON schemas, as an object or as JSON in a string
    (extension)."""
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
    model_config = ConfigDict(extra="allow")

    type: str | None = None
    """`text`, or another server's name of a part with text. Others are refused in the current turn,
    and left out before."""
    text: str | None = None


_Parts = Annotated[list[ContentPart | str], Field(fail_fast=True, max_length=MAX_PARTS)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)]
_Calls = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_CALLS)]


class Message(_Part):
    role: str
    """`system`, `developer`, `user`, `assistant`, `tool`, or another that the model's chat template
    takes."""
    content: str | _Parts | None = None
    """Text, or a list of text parts; an assistant's may be null."""
    name: str | None = None
    """Who speaks, for chat templates that write it."""
    tool_calls: _Calls | None = None
    """The calls of an earlier answer, as it had them."""
    tool_call_id: str | None = None
    """The id of the call whose result this message of the role `tool` is."""
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for chat templates that use it (extension)."""
    reasoning: str | None = None
    """Another name for `reasoning_content` (extension)."""
    reasoning_details: _Objects | None = None
    """Another server's form of `reasoning_content` (extension)."""
    thinking_blocks: _Objects | None = None
    """Another server's form of `reasoning_content` (extension)."""
    refusal: str | None = None
    """The refusal of an earlier answer, which takes the place of its content."""
    function_call: dict[str, Any] | None = None
    """An older form of `tool_calls`."""
    audio: dict[str, Any] | None = None
    """The `transcript` of an earlier answer is its text."""


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    ignored = IGNORED | _IGNORED_IN_CHATS
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED_IN_CHATS}

    messages: Messages
    """The conversation; the model's chat template is applied to it."""
    max_completion_tokens: Int | None = None
    """Another name for `max_tokens`. Default: the rest of the context."""
    logprobs: bool | None = None
    """Return the log probability of each token, computed from the raw logits, without temperature,
    penalties and biases."""
    top_logprobs: Int | None = None
    """0 … 20, with `logprobs`: number of most likely tokens returned at each position."""
    add_generation_prompt: bool | None = None
    """Whether the template begins the assistant's turn (extension). Default true."""
    continue_final_message: bool | None = None
    """Continue the last message, which stays open (extension). Default false."""
    chat_template_kwargs: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """More variables for the chat template (extension)."""
    reasoning_effort: str | None = None
    """How much the model reasons: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`."""
    enable_thinking: bool | None = None
    """Whether the model reasons (extension). Default: that of its chat template."""
    thinking: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """`{"type": "enabled", "budget_tokens": …}`, or `disabled` or `adaptive`, in Anthropic's form.
    It replaces `enable_thinking` and `thinking_token_budget` (extension)."""
    thinking_token_budget: Int | None = None
    """Maximum number of reasoning tokens, after which the end is forced; -1: no maximum
    (extension)."""
    include_reasoning: bool | None = None
    """false omits the reasoning from the answer, but not from the usage (extension). Default true.
    """
    tools: ToolDefinitions | None = None
    """Up to 128 functions that the model may call."""
    tool_choice: Any = Field(default=None, json_schema_extra={"type": ["string", "object", "null"]})
    """`none`, `auto` (the default), `required`, or the name of a function in OpenAI's form."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default true."""


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    ignored = IGNORED | _IGNORED_IN_COMPLETIONS
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED_IN_COMPLETIONS}

    prompt: str | Strings | Ints | IntLists
    """Text, a list of texts, a list of token ids, or a list of lists of token ids."""
    logprobs: Count = None
    """Return the log probability of each token, and this number of most likely tokens: 0 … 20
    (OpenAI: 5). Computed from the raw logits, without temperature, penalties and biases."""
    echo: bool | None = None
    """Put the prompt before the answer. With `logprobs` its tokens are scored too, and `max_tokens`
    may be 0."""
    best_of: Int | None = None
    """Generate this number of answers and return the `n` with the highest mean log probability. Not
    with `stream`."""


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
    tool_calls: list[MessageToolCall | MessageCustomToolCall]


class _Reasoned(BaseModel):
    """The reasoning before an answer, under both names that clients use."""

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
    system_fingerprint: str | None
    """Fingerprint of the workers that answered: of their weights, quantization and types."""


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
    system_fingerprint: str | None
    """Fingerprint of the workers that answered: of their weights, quantization and types."""


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    """The id again, for clients that take the first listed model (extension)."""
    max_model_len: int
    """Maximum tokens of prompt and answer together (extension)."""
    default_sampling_params: dict[str, float] = Field(default_factory=dict)
    """Sampling parameters of requests that do not set them (extension)."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
