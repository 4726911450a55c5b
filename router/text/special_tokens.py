"""The special and added tokens that the files next to a tokenizer.json name.

The rules are those of ``AutoTokenizer`` in Hugging Face transformers 5:

- ``tokenizer_config.json`` names special tokens. If its ``added_tokens_decoder`` lists the added
  tokens, no other file is read.
- Otherwise ``special_tokens_map.json`` goes first, and ``added_tokens.json`` has further tokens.
- A token that the vocabulary lacks is added at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config_fields import ConfigFields
from baton.errors import ConfigError

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Fields that name a special token: its text, or an object with it. Other fields with such an
ending may have other types, such as ``add_bos_token``."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LIST_FIELDS = ("extra_special_tokens", "additional_special_tokens")
_QWEN, _GEMMA, _LLAMA = "Qwen2Tokenizer", "GemmaTokenizer", "LlamaTokenizer"
_CLASS_OF_TYPE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _QWEN),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _GEMMA),
}
"""Tokenizer class of each ``model_type`` in config.json, if no file names another class."""
_DEFAULTS = {
    _LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    _QWEN: dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    _GEMMA: {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""Special tokens of a tokenizer class, for fields that no file has."""
Token = Mapping[str, Any]
"""An added token: its ``content``, and the flags that tokenizer.json has for it."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the files next to a tokenizer.json say about its tokens."""

    names: Mapping[str, str]
    """Text of each special token by its name in chat templates, such as ``bos_token``."""
    added: Mapping[str, Any]
    """What to add, as ``router.text.tokenizer_program.add_tokens`` takes it."""


def read_special_tokens(folder: Path, settings: ConfigFields, model: ConfigFields) -> SpecialTokens:
    """Read a model's folder; ``settings`` is its tokenizer_config.json and ``model`` its
    config.json.

    Raises ConfigError with the names of a bad file and field.
    """
    listed = settings.get("added_tokens_decoder") is not None
    older = ConfigFields(folder / "special_tokens_map.json", {})
    if not listed:
        older = ConfigFields.read_if_any(older.path)
    defaults = _DEFAULTS.get(_class_name(folder, settings, model), {})
    named: dict[str, Token | None] = {
        name: _special(settings, text) for name, text in defaults.items()
    }
    for file in (settings, older):
        named.update(_named(file))
    extra = list(_extra(settings))
    if file_extra := older.get("extra_special_tokens"):
        extra += _extra(ConfigFields(older.path, {"extra_special_tokens": file_extra}))
    if not any(field in settings.values for field in _LIST_FIELDS):
        extra += _extra(older, "additional_special_tokens")
    special = {name: token for name, token in named.items() if token is not None}
    standard = [special[name] for name in _NAMED if name in special]
    others = [token for name, token in special.items() if name not in _NAMED]
    contents = {token["content"] for token in (*special.values(), *extra)}
    by_id = _listed(settings) if listed else _older_added(folder, contents)
    return SpecialTokens(
        {name: token["content"] for name, token in special.items()},
        {"by_id": by_id, "keeps": not listed, "named": [*standard, *others], "extra": extra},
    )


def _class_name(folder: Path, settings: ConfigFields, model: ConfigFields) -> str:
    """Return the class with which transformers loads the tokenizer, for the default tokens."""
    named = settings.get("tokenizer_class") or model.get("tokenizer_class")
    kind = model.get("model_type")
    registered = _CLASS_OF_TYPE.get(kind) if isinstance(kind, str) else None
    if not isinstance(named, str) or kind == "qwen2":
        return registered or ""
    name = named.removesuffix("Fast")
    if name != _LLAMA:
        return name
    # Llama 3 names this class, and has other tokens.
    text = (folder / "tokenizer.json").read_text(encoding="utf-8", errors="replace")
    return "" if '"ByteLevel"' in text else name


def _named(file: ConfigFields) -> Iterator[tuple[str, Token | None]]:
    """Yield the special tokens that a file names; None for a field that is null."""
    for name, value in file.values.items():
        if name in _NAMED:
            yield name, None if value is None else _special(file, value, name)
        elif name.endswith("_token") and isinstance(value, str | dict):
            yield name, _special(file, value, name)
    extra = file.get("extra_special_tokens")
    if isinstance(extra, dict):
        for name, value in extra.items():
            yield name, _special(file, value, f"extra_special_tokens.{name}")


def _extra(file: ConfigFields, *fields: str) -> Iterator[Token]:
    """Yield the special tokens without a name that a file lists."""
    for field in fields or _LIST_FIELDS:
        if isinstance(file.get(field), dict) and field == "extra_special_tokens":
            continue
        found = file.list(field)
        for place, value in enumerate(found):
            yield _special(file, value, f"{field}[{place}]")
        if found:
            return


def _listed(settings: ConfigFields) -> list[Token]:
    field = "added_tokens_decoder"
    tokens: list[Token] = []
    for number, value in settings.object(field).values.items():
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise ConfigError(f"{settings.path}: {field} has the id {number!r}, which is no number")
        token = _token(settings, value, f"{field}.{number}", special=False)
        tokens.append({**token, "id": int(number)})
    return tokens


def _older_added(folder: Path, special: set[str]) -> list[Token]:
    file = ConfigFields.read_if_any(folder / "added_tokens.json")
    tokens: list[Token] = []
    for content, number in file.values.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**9:
            raise ConfigError(f"{file.path}: the id of {content!r} is {number!r}, and no number")
        token = _token(file, content, content, special=content in special)
        tokens.append({**token, "id": number})
    return tokens


def _special(file: ConfigFields, value: Any, field: str = "") -> Token:
    return {**_token(file, value, field, special=True), "special": True}


def _token(file: ConfigFields, value: Any, field: str, *, special: bool) -> Token:
    """Return a token that a file gives as a text, or as an object with ``content`` and flags."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(
            f"{file.path}: {field} must be a text, or an object with its content, and is {value!r}"
        )
    flags = (
        {name: value[name] for name in _FLAGS if name in value} if isinstance(value, dict) else {}
    )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(
                f"{file.path}: {field}: {name} must be true or false, and is {flag!r}"
            )
    special = flags.get("special", special)
    return {"content": content, "normalized": not special, **flags, "special": special}
