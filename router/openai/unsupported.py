"""Known fields that would change the answer and are not served: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import UnsupportedParameter

# Field → values that ask for nothing; null always does.
_BOTH: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "return_tokens_as_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "vllm_xargs": (),
}
_CHAT: dict[str, tuple[Any, ...]] = {
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
_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


def refuse_unsupported_chat(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter that names the field."""
    _refuse(body, {**_BOTH, **_CHAT})


def refuse_unsupported_completion(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter that names the field."""
    _refuse(body, {**_BOTH, **_COMPLETION})


def _refuse(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    for name in table.keys() & body.keys():
        if body[name] is not None and not _is_one_of(body[name], table[name]):
            raise UnsupportedParameter(
                f"'{name}' is not supported with this value by this server", param=name
            )


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True equals 1 in Python, but not in JSON.
    return any(
        value == candidate and isinstance(value, bool) == isinstance(candidate, bool)
        for candidate in harmless
    )
