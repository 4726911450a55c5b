"""Reads what a body asks of an answer: how many, what beside text, and what it has to match.

Functions raise InvalidRequest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton.errors import InvalidRequest, UnsupportedParameter
from baton.grammar import Grammar, GrammarKind
from baton.logprobs import MAX_TOP_LOGPROBS
from router.inference.prompt import Ending, checked_variables
from router.inference.reasoning import (
    ReasoningInput,
    checked_budget,
    checked_effort,
    checked_thinking,
)
from router.openai.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields

MAX_CHOICES = 128
"""Answers to one prompt."""
MAX_ANSWERS = 1024
"""Answers to all prompts of a request."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORMATS = "text, json_object or json_schema"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client asks for beside text, and how much of it."""

    n: int = 1
    """Answers to each prompt that are shown."""
    best_of: int = 1
    """Answers to each prompt that are drawn."""
    logprobs: int | None = None
    """Likeliest tokens to tell beside each token's log probability; None: tell none."""
    prompt_logprobs: int | None = None
    """The same of the prompt, in a field of its own."""
    echo: bool = False
    """The prompt comes before each answer."""
    token_ids: bool = False
    """Tell the token ids of prompt and answer."""
    usage: bool = False
    """The stream ends with the usage."""
    continuous_usage: bool = False
    """Every event of the stream has the usage so far."""
    no_answer: bool = False
    """The prompt alone is shown: the one token that is drawn is not, and does not count."""

    @property
    def plain(self) -> bool:
        """Whether text is all."""
        asked = self.echo or self.token_ids
        return self.logprobs is None and self.prompt_logprobs is None and not asked


def chat_options(body: ChatCompletionRequest) -> AnswerOptions:
    """What a chat request asks for."""
    logprobs = _count("top_logprobs", body.top_logprobs)
    if logprobs is not None and not body.logprobs:
        if logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = None
    if body.logprobs and logprobs is None:
        logprobs = 0
    n = _choices("n", body.n)
    return AnswerOptions(
        n=n,
        best_of=n,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        token_ids=bool(body.return_token_ids),
        **_usage(body),
    )


def completion_options(body: CompletionRequest, prompts: int) -> AnswerOptions:
    """What a request for completions of so many prompts asks for."""
    n = _choices("n", body.n)
    best_of = n if not body.best_of else _choices("best_of", body.best_of)
    if best_of < n:
        raise InvalidRequest("best_of must be at least n", param="best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            "best_of chooses among whole answers: it cannot be more than n with stream",
            param="best_of",
        )
    if prompts * best_of > MAX_ANSWERS:
        raise InvalidRequest(f"at most {MAX_ANSWERS} answers a request are possible", param="n")
    return AnswerOptions(
        n=n,
        best_of=best_of,
        logprobs=_count("logprobs", body.logprobs),
        prompt_logprobs=_prompt_logprobs(body),
        echo=bool(body.echo),
        token_ids=bool(body.return_token_ids),
        no_answer=bool(body.echo) and body.max_tokens == 0,
        **_usage(body),
    )


def scoring(options: AnswerOptions) -> tuple[int | None, int | None]:
    """The log probabilities that workers are asked for: of the answer, of the prompt."""
    logprobs = options.logprobs
    if logprobs is None and options.best_of > options.n:
        logprobs = 0
    wanted = [options.prompt_logprobs, options.logprobs if options.echo else None]
    return logprobs, max((count for count in wanted if count is not None), default=None)


def _usage(body: SamplingFields) -> dict[str, bool]:
    options = body.stream_options
    if options is None:
        return {}
    if not body.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    usage = bool(options.include_usage)
    return {"usage": usage, "continuous_usage": usage and bool(options.continuous_usage_stats)}


def _choices(name: str, given: int | None) -> int:
    if given is None:
        return 1
    if not 1 <= given <= MAX_CHOICES:
        raise InvalidRequest(f"{name} must be between 1 and {MAX_CHOICES}", param=name)
    return given


def _count(name: str, given: int | None) -> int | None:
    if given is not None and not 0 <= given <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}", param=name)
    return given


def _prompt_logprobs(body: SamplingFields) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not for stream: true", param="prompt_logprobs")
    return _count("prompt_logprobs", body.prompt_logprobs)


def template_options(body: ChatCompletionRequest) -> tuple[Ending, dict[str, Any]]:
    """How the prompt ends, and more variables of the chat template. Raises InvalidRequest."""
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = {} if body.chat_template_kwargs is None else body.chat_template_kwargs
    if not isinstance(variables, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    checked_variables(variables, "chat_template_kwargs")
    if continued:
        return "open", variables
    return "closed" if body.add_generation_prompt is False else "answer", variables


def reasoning_options(body: ChatCompletionRequest) -> ReasoningInput:
    """What a chat request asks of the reasoning. Raises InvalidRequest."""
    thinking = checked_thinking(body.thinking)
    for name in ("enable_thinking", "thinking_token_budget"):
        if body.thinking is not None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} and thinking exclude each other", param=name)
    found = replace(thinking, effort=checked_effort(body.reasoning_effort, "reasoning_effort"))
    if body.thinking is None:
        name = "thinking_token_budget"
        budget = checked_budget(body.thinking_token_budget, name)
        found = replace(found, enabled=body.enable_thinking, budget=budget, budget_param=name)
    return found


class GrammarFields(Protocol):
    """The fields of a body that ask for one."""

    @property
    def response_format(self) -> Any: ...
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...
    @property
    def structured_outputs(self) -> Any: ...


def grammar_of(body: GrammarFields) -> dict[str, Any]:
    """The one grammar that a body asks for, as fields of ``SamplingInput``; none where it asks for

    none. Raises InvalidRequest.
    """
    given = [
        (grammar, param)
        for param, grammar in (
            ("response_format", _response_format(body.response_format)),
            ("guided_json", _schema(body.guided_json, "guided_json")),
            ("guided_regex", _text(GrammarKind.REGEX, body.guided_regex, "guided_regex")),
            ("guided_choice", choice(body.guided_choice, "guided_choice")),
            ("guided_grammar", _text(GrammarKind.LARK, body.guided_grammar, "guided_grammar")),
        )
        if grammar is not None
    ]
    given += _structured_outputs(body.structured_outputs)
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[0][1]} and {given[1][1]} exclude each other: give one", param=given[1][1]
        )
    return {"grammar": given[0][0], "grammar_param": given[0][1]} if given else {}


def choice(texts: Any, param: str) -> Grammar | None:
    """One of some texts; None where nothing is given. Raises InvalidRequest."""
    if texts is None:
        return None
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} must be a list of at least one string", param=param)
    return Grammar(GrammarKind.CHOICE, json.dumps(list(texts)))


def _response_format(given: Any) -> Grammar | None:
    param = "response_format"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a type", param=param)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            return _json_schema(given.get("json_schema"), f"{param}.json_schema")
        case _:
            raise InvalidRequest(f"{param}.type must be {_FORMATS}", param=f"{param}.type")


def _json_schema(given: Any, param: str) -> Grammar:
    """``strict`` is taken either way: what can be kept is kept strictly, the rest is refused."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with name and schema", param=param)
    name, strict = given.get("name"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name must have 1 to 64 letters, digits, underscores and dashes",
            param=f"{param}.name",
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict must be true or false", param=f"{param}.strict")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{param}.schema must be a JSON schema", param=f"{param}.schema")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _schema(given: Any, param: str) -> Grammar | None:
    """A schema as an object, or as JSON in a string."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(given))
    if isinstance(given, str):
        return Grammar(GrammarKind.JSON_SCHEMA, given)
    raise InvalidRequest(f"{param} must be a JSON schema", param=param)


def _text(kind: GrammarKind, given: Any, param: str) -> Grammar | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{param} must be a string that is not empty", param=param)
    return Grammar(kind, given)


def _structured_outputs(given: Any) -> list[tuple[Grammar, str]]:
    param = "structured_outputs"
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object", param=param)
    found: dict[str, Grammar | None] = {
        "json": _schema(given.get("json"), f"{param}.json"),
        "regex": _text(GrammarKind.REGEX, given.get("regex"), f"{param}.regex"),
        "choice": choice(given.get("choice"), f"{param}.choice"),
        "grammar": _text(GrammarKind.LARK, given.get("grammar"), f"{param}.grammar"),
        "json_object": _json_object(given.get("json_object"), f"{param}.json_object"),
    }
    for name, value in given.items():
        if name not in found and value is not None and value is not False:
            shown = f"{param}.{name}"[:64]
            raise UnsupportedParameter(f"'{shown}' is not supported by this server", param=shown)
    inputs = [
        (grammar, f"{param}.{name}") for name, grammar in found.items() if grammar is not None
    ]
    if not inputs:
        raise InvalidRequest(f"{param} must have one of {', '.join(found)}", param=param)
    return inputs


def _json_object(given: Any, param: str) -> Grammar | None:
    if given is None or given is False:
        return None
    if given is not True:
        raise InvalidRequest(f"{param} must be true or false", param=param)
    return Grammar(GrammarKind.JSON_OBJECT, "")
