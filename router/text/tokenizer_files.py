"""The files of a model's folder that a router reads, checked before they are used.

A folder may come from a hub, so every error names the file, and the field if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from baton.sandbox.sandbox import BoundExceeded, Bounds, ProgramBroken, Sandbox
from router.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate

MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of a tokenizer.json. The largest published ones have 33 MiB."""
_MAX_CPU_S = 25.0
_BASE_MEMORY_BYTES, _MEMORY_PER_BYTE = 512 << 20, 24
"""Memory to load a tokenizer.json: a constant, and a multiple of the file's size."""
_PREPARE_CPU_S, _PREPARE_MEMORY_BYTES = 10.0, 512 << 20
_TEXT_FIELDS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Fields of a tokenizer_config.json that name a special token: its text, or an object with it.
Other fields with such an ending may have other types, such as ``add_bos_token``."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a model's folder say about its tokenizer."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    vocab_size: int | None
    """Number of token ids of the model; None if config.json does not say it."""
    chat_template: ChatTemplate | None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a folder. Raises ConfigError with the names of a bad file and field."""
    backend = load_backend(folder / "tokenizer.json")
    settings = ConfigFields.read_if_any(folder / "tokenizer_config.json")
    special = _special_tokens(settings)
    model = ConfigFields.read_if_any(folder / "config.json")
    generation = ConfigFields.read_if_any(folder / "generation_config.json")
    # A model for text and images has a separate section for text.
    section = model.object("text_config") if model.get("text_config") else model
    named = backend.token_to_id(special.get("eos_token", ""))
    return TokenizerFiles(
        backend,
        (*generation.eos_ids(), *model.eos_ids(), *([] if named is None else [named])),
        section.vocab_size() or model.vocab_size(),
        load_chat_template(folder, settings, special),
    )


def load_backend(file: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer.json, after a sandboxed process has loaded and used it.

    Raises ConfigError, and BatonError if no process can be started.
    """
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no {file.name}")
    size = file.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"{file} has {size} bytes; the limit is {MAX_TOKENIZER_BYTES}")
    memory = _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * size
    bounds = Bounds(_MAX_CPU_S, memory, _PREPARE_CPU_S, _PREPARE_MEMORY_BYTES)
    try:
        answer = Sandbox("router.text.tokenizer_program", dict, bounds).ask(
            {"file": str(file.resolve())}
        )
    except BoundExceeded as error:
        raise ConfigError(f"{file} cannot be used: to load it needs {error}") from None
    except ProgramBroken as error:
        raise ConfigError(f"the library tokenizers cannot be loaded: {error}") from None
    if "refused" in answer:
        raise ConfigError(f"{file} cannot be read: {answer['refused']}")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the file has changed since
        raise ConfigError(f"{file} cannot be read: {error}") from error


def load_chat_template(
    folder: Path, settings: ConfigFields, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Load the template of a model's folder; None if it has none. Raises ConfigError.

    ``settings``: its tokenizer_config.json, which may have the template.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > 4 * MAX_SOURCE_CHARACTERS:
            raise ConfigError(f"{file} has more than {MAX_SOURCE_CHARACTERS} characters")
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
    if isinstance(settings.get("chat_template"), list):
        sources = {}
        for entry in settings.list("chat_template"):
            if not isinstance(entry, dict):
                raise ConfigError(
                    f"{settings.path}: chat_template must be a text, or a list of objects with"
                    f" name and template; it has {entry!r}"
                )
            fields = ConfigFields(settings.path, entry)
            sources[fields.text("name")] = fields.text("template")
        source, tool_use = sources.get("default"), sources.get("tool_use")
    else:
        source, tool_use = settings.text("chat_template"), None
    try:
        return ChatTemplate(source, special_tokens, tool_use) if source else None
    except ConfigError as error:
        raise ConfigError(f"{settings.path}: chat_template: {error.message}") from error


def _special_tokens(settings: ConfigFields) -> dict[str, str]:
    """Return the text of each special token that a tokenizer_config.json names, by its name, such
    as ``bos_token``."""
    tokens = {}
    for name, value in settings.values.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
        elif name in _TEXT_FIELDS and value is not None:
            raise ConfigError(
                f"{settings.path}: {name} must be a text, or an object with its content, and is"
                f" {value!r}"
            )
    return tokens
