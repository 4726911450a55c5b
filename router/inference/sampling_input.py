"""Sampling parameters as a client gave them, and the check that makes them final."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from baton.grammar import Grammar
from baton.logprobs import MAX_TOP_LOGPROBS
from baton.sampling_params import SamplingParams
from router.text.tokenizer import Tokenizer

MAX_WORDS = 128
"""Maximum number of words in ``bad_words``."""
MAX_WORD_CHARACTERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 300
MAX_ALLOWED = 16_384
"""Maximum number of ``allowed_token_ids``."""
MAX_SCORES = 768 << 10
"""Maximum number of log probabilities in one request. Each token counts once, plus its requested
top alternatives. A router holds each in 8 to 20 bytes."""
MAX_LINE_SCORES = MAX_SCORES // 8
"""Maximum number of log probabilities in one batch request line. The limit is lower since its
answer is kept as text."""
MAX_BAD_RUNS = 256
MAX_BAD_RUN_TOKENS = 64
_SHOWN_CHARACTERS = 64
"""Maximum number of characters of a client's value that an error shows."""
_MIN_TEMPERATURE = 1e-3
"""Minimum temperature above 0. Lower values would overflow logits in 32 bits. At this value,
sampling already gives the same tokens as greedy decoding."""
_MIN_TOP_P = 1e-6
"""Minimum ``top_p``. The most likely token always has a higher probability. Smaller values would
become 0 in messages to workers."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Sampling parameters as the client gave them. None or empty means not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    is_cut_to_room: bool = False
    """Whether ``max_tokens`` may exceed the room in the context, and is then cut to it. Clients of
    some APIs send one large number always."""
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[Any, Any] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of consecutive token ids that the answer must not contain."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    no_answer: bool = False
    """Whether ``max_tokens`` may be 0, for clients that only need data about the prompt. One token
    is still generated, and dropped."""
    shows_stop_string: bool = False
    """Whether the text of an answer includes the stop string that ended the answer."""
    shows_special_tokens: bool = False
    """Whether the text of an answer includes special tokens, except for the one that ended the
    answer."""
    truncate: int | None = None
    """Number of tokens to keep at the prompt's end. -1 means as many as fit; None means all."""
    grammar: Grammar | None = None
    grammar_param: str = "grammar"
    """The client's name for the field that sets the grammar."""


def with_defaults(given: SamplingInput, defaults: Mapping[str, float]) -> SamplingInput:
    """Return a client's sampling parameters. Those that it did not set have the values of
    ``defaults``, except for ``max_tokens``."""
    absent: dict[str, Any] = {
        name: value
        for name, value in defaults.items()
        if name != "max_tokens" and getattr(given, name) is None
    }
    return replace(given, **absent) if absent else given


def check_defaults(defaults: Mapping[str, float]) -> None:
    """Check that sampling parameters from a model's generation_config.json are within the limits of
    requests. Raises ConfigError."""
    try:
        final_sampling(
            with_defaults(SamplingInput(), defaults),
            prompt_tokens=1,
            context_length=2,
            vocab_size=1,
            default_max_tokens=None,
        )
    except InvalidRequest as error:
        raise ConfigError(
            f"the model's generation_config.json cannot be used: {error.message}; correct it, or"
            " set generation_config to none"
        ) from None


def final_sampling(
    given: SamplingInput,
    *,
    prompt_tokens: int,
    context_length: int,
    vocab_size: int,
    default_max_tokens: int | None,
    prompt_param: str = "prompt",
    eos_ids: Collection[int] = (),
) -> SamplingParams:
    """Check a client's sampling parameters, and fill in those that are absent. The seed is drawn if
    none was given.

    ``default_max_tokens``: the maximum length of the answer if the client sets none; None means the
    rest of the context. ``prompt_param``: the name of the client's field that has the prompt.
    Raises InvalidRequest, naming the parameter, and ContextLengthExceeded."""
    check_prompt_length(prompt_tokens, context_length, prompt_param)
    asked = 1 if given.no_answer and given.max_tokens == 0 else given.max_tokens
    if asked is not None and given.is_cut_to_room:
        asked = min(asked, context_length - prompt_tokens)
    max_tokens = _max_tokens(asked, prompt_tokens, context_length, default_max_tokens)
    temperature = _within("temperature", given.temperature, 0, 2, 1)
    if temperature > 0:
        temperature = max(temperature, _MIN_TEMPERATURE)
    top_p = _within("top_p", given.top_p, 0, 1, 1)
    if top_p == 0:
        raise InvalidRequest("top_p must be above 0", param="top_p")
    found = SamplingParams(
        temperature=temperature,
        top_p=max(top_p, _MIN_TOP_P),
        top_k=_top_k(given.top_k, vocab_size),
        min_p=_within("min_p", given.min_p, 0, 1, 0),
        seed=_seed(given.seed),
        stop=_stops(given.stop),
        stop_token_ids=_stop_token_ids(given.stop_token_ids, vocab_size),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(given.min_tokens, max_tokens),
        ignore_eos=bool(given.ignore_eos),
        presence_penalty=_within("presence_penalty", given.presence_penalty, -2, 2, 0),
        frequency_penalty=_within("frequency_penalty", given.frequency_penalty, -2, 2, 0),
        repetition_penalty=_within("repetition_penalty", given.repetition_penalty, 1e-3, 10, 1),
        logit_bias=_logit_bias(given.logit_bias, vocab_size),
        allowed_token_ids=_allowed(given, vocab_size),
        bad_words=_bad_words(given.bad_words, vocab_size),
        logprobs=_logprobs("logprobs", given.logprobs),
        prompt_logprobs=_logprobs("prompt_logprobs", given.prompt_logprobs),
        grammar=given.grammar,
    )
    _check_some_token_comes(found, eos_ids)
    return found


def _check_some_token_comes(sampling: SamplingParams, eos_ids: Collection[int]) -> None:
    """Check that the parameters allow at least one token as the first token of an answer. Raises
    InvalidRequest."""
    forbidden = {run[0] for run in sampling.bad_words if len(run) == 1}
    if sampling.min_tokens:
        forbidden.update(sampling.stop_token_ids, eos_ids if sampling.ends_at_eos else ())
    if sampling.allowed_token_ids and forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids: all of them are forbidden, by bad_words or, since they end the"
            " answer, by min_tokens; allow another token, or leave those out",
            param="allowed_token_ids",
        )


def _logprobs(name: str, given: int | None) -> int | None:
    if given is not None and not 0 <= given <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}", param=name)
    return given


def _allowed(given: SamplingInput, vocab_size: int) -> tuple[int, ...]:
    name, ids = "allowed_token_ids", given.allowed_token_ids
    if ids is None:
        return ()
    if not ids:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    if len(ids) > MAX_ALLOWED:
        raise InvalidRequest(f"{name} has at most {MAX_ALLOWED} ids", param=name)
    if given.grammar is not None:
        raise InvalidRequest(f"{name} cannot be combined with a structured answer", param=name)
    check_token_ids(ids, vocab_size, name)
    return tuple(sorted(set(ids)))


def _bad_words(given: tuple[tuple[int, ...], ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if len(given) > MAX_BAD_RUNS:
        raise InvalidRequest(f"bad_words has at most {MAX_BAD_RUNS} runs", param="bad_words")
    for run in given:
        if not 0 < len(run) <= MAX_BAD_RUN_TOKENS:
            raise InvalidRequest(
                f"bad_words: a word has 1 to {MAX_BAD_RUN_TOKENS} tokens", param="bad_words"
            )
        check_token_ids(run, vocab_size, "bad_words")
    return given


def kept_tokens(given: SamplingInput, context_length: int) -> int | None:
    """Return the number of tokens to keep at a prompt's end; None means all. Raises
    InvalidRequest."""
    most = given.truncate
    if most == -1:
        most = context_length - max(1, given.max_tokens or 1)
    if most is not None and most < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    return most


def check_prompt_length(tokens: int, context_length: int, param: str) -> None:
    """Check that a prompt of ``tokens`` tokens leaves room for an answer. Raises
    ContextLengthExceeded.

    ``param``: the name of the client's field that has the prompt."""
    if tokens >= context_length:
        raise ContextLengthExceeded(
            f"the model's context is {context_length} tokens, the prompt has {tokens}: nothing is"
            " left for an answer",
            param=param,
        )


def _within(name: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return float(default)
    # Written so that NaN, which compares false with everything, is refused.
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}", param=name)
    return float(value)


def _max_tokens(given: int | None, prompt: int, context: int, default: int | None) -> int:
    room = context - prompt
    if given is None:
        return room if default is None else min(default, room)
    if given < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if given > room:
        raise ContextLengthExceeded(
            f"the model's context is {context} tokens; the prompt has {prompt}"
            f" and max_tokens asks for more than the {room} that are left",
            param="max_tokens",
        )
    return given


def _min_tokens(given: int | None, max_tokens: int) -> int:
    if given is None:
        return 0
    if not 0 <= given <= max_tokens:
        raise InvalidRequest(
            f"min_tokens must be between 0 and max_tokens, which is {max_tokens}",
            param="min_tokens",
        )
    return given


def _top_k(given: int | None, vocab_size: int) -> int:
    if given is None or given == -1:
        return 0
    if given < 0:
        raise InvalidRequest("top_k must be -1, 0 or more", param="top_k")
    # A top_k of the whole vocabulary filters nothing.
    return 0 if given >= vocab_size else given


def _seed(given: int | None) -> int:
    if given is None:
        return secrets.randbits(64)
    if not -(1 << 63) <= given < 1 << 64:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return given & ((1 << 64) - 1)


def _stops(given: tuple[str, ...]) -> tuple[str, ...]:
    if len(given) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings are possible", param="stop")
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in given):
        raise InvalidRequest(
            f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters", param="stop"
        )
    return given


def _stop_token_ids(given: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if len(given) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKENS} stop_token_ids are possible", param="stop_token_ids"
        )
    check_token_ids(given, vocab_size, "stop_token_ids")
    return given


def scored_tokens(given: SamplingInput, choices: int, limit: int) -> int | None:
    """Return the maximum number of tokens of each answer with which a request has at most ``limit``
    log probabilities. None means no maximum."""
    return None if given.logprobs is None else max(1, limit // (choices * (1 + given.logprobs)))


def check_scores(requests: Sequence[tuple[int, SamplingParams, int]], limit: int) -> None:
    """Check that a request asks for at most ``limit`` log probabilities in all.

    ``requests``: for each prompt its number of tokens, its sampling parameters and its number of
    choices. Raises InvalidRequest.
    """
    answers = prompts = 0
    for tokens, sampling, choices in requests:
        if sampling.logprobs is not None:
            answers += choices * sampling.max_tokens * (1 + sampling.logprobs)
        if sampling.prompt_logprobs is not None:
            prompts += choices * tokens * (1 + sampling.prompt_logprobs)
    if answers + prompts > limit:
        raise InvalidRequest(
            f"this request asks for up to {answers + prompts} log probabilities (prompts and"
            f" answers times their tokens times the top tokens at each position); at most {limit}"
            " are possible: ask for fewer prompts, answers, tokens or top tokens",
            param="logprobs" if answers > prompts else "prompt_logprobs",
        )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that all token ids are within the vocabulary. Raises InvalidRequest."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(one for one in token_ids if not 0 <= one < vocab_size)
        raise InvalidRequest(
            f"{param}: token ids must be between 0 and {vocab_size - 1}, and {_shown(bad)} is not",
            param=param,
        )


def _logit_bias(given: Mapping[Any, Any] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidRequest("logit_bias must be an object", param="logit_bias")
    if len(given) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has at most {MAX_BIASES} entries", param="logit_bias")
    biases = {_token_id(key): _bias(key, value) for key, value in given.items()}
    check_token_ids(tuple(biases), vocab_size, "logit_bias")
    return tuple(sorted(biases.items()))


def _token_id(key: str | int) -> int:
    if isinstance(key, int):
        return key
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidRequest(
            f"the keys of logit_bias must be token ids, and {_shown(key)} is not one",
            param="logit_bias",
        )
    return int(key)


def _bias(key: str | int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise InvalidRequest(
            "the values of logit_bias must be numbers between -100 and 100: that of"
            f" {_shown(key)} is not",
            param="logit_bias",
        )
    return float(value)


def _shown(value: str | int) -> str:
    """Format a client's value for an error message: as JSON, cut to a few characters."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def banned_runs(tokenizer: Tokenizer, words: Iterable[str] | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words to be banned. Each word has two: at the start of a text,
    and after a space.

    Other ways to tokenize a word are not covered. Raises InvalidRequest."""
    words = list(words or ())
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"bad_words has at most {MAX_WORDS} words", param="bad_words")
    runs: set[tuple[int, ...]] = set()
    for place, word in enumerate(words):
        if len(word) > MAX_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words[{place}] has at most {MAX_WORD_CHARACTERS} characters",
                param="bad_words",
            )
    for place, word in enumerate(words):
        bare = word.strip()
        if not bare:
            raise InvalidRequest(f"bad_words[{place}] must not be empty", param="bad_words")
        for text in (bare, f" {bare}"):
            run = tokenizer.encode(text, add_special_tokens=False)
            tokenizer.check_embedded(run, f"bad_words[{place}]")
            runs.add(run)
    return tuple(sorted(runs))
