"""The files of a model's folder that a router reads, checked before they are used.

A folder may come from a hub, so every error names the file, and the field if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from baton.hashing import TEMPLATE_FOLDER
from baton.sandbox.sandbox import BoundExceeded, Bounds, ProgramBroken, Sandbox
from router.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate
from router.text.special_tokens import read_special_tokens
from router.text.tokenizer_program import add_tokens

MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of a tokenizer.json. The largest published ones have 33 MiB."""
_MAX_CPU_S = 25.0
_BASE_MEMORY_BYTES, _MEMORY_PER_BYTE = 512 << 20, 24
"""Memory to load a tokenizer.json: a constant, and a multiple of the file's size."""
_PREPARE_CPU_S, _PREPARE_MEMORY_BYTES = 10.0, 512 << 20


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
    file = folder / "tokenizer.json"
    _check_size(file)
    settings = ConfigFields.read_if_any(folder / "tokenizer_config.json")
    model = ConfigFields.read_if_any(folder / "config.json")
    special = read_special_tokens(folder, settings, model)
    backend = load_backend(file, special.added)
    backend.encode_special_tokens = settings.flag("split_special_tokens")
    generation = ConfigFields.read_if_any(folder / "generation_config.json")
    # A model for text and images has a separate section for text.
    section = model.object("text_config") if model.get("text_config") else model
    named = backend.token_to_id(special.names.get("eos_token", ""))
    return TokenizerFiles(
        backend,
        (*generation.eos_ids(), *model.eos_ids(), *([] if named is None else [named])),
        section.vocab_size() or model.vocab_size(),
        load_chat_template(folder, settings, special.names),
    )


def _check_size(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no {file.name}")
    size = file.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"{file} has {size} bytes; the limit is {MAX_TOKENIZER_BYTES}")


def load_backend(file: Path, added: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Load a tokenizer.json with further added tokens, after a sandboxed process has loaded and
    used both. ``added``: as for ``router.text.tokenizer_program.add_tokens``.

    Raises ConfigError, and BatonError if no process can be started.
    """
    memory = _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * file.stat().st_size
    bounds = Bounds(_MAX_CPU_S, memory, _PREPARE_CPU_S, _PREPARE_MEMORY_BYTES)
    try:
        answer = Sandbox("router.text.tokenizer_program", dict, bounds).ask(
            {"file": str(file.resolve()), "added": added}
        )
    except BoundExceeded as error:
        raise ConfigError(f"{file} cannot be used: to load it needs {error}") from None
    except ProgramBroken as error:
        raise ConfigError(f"the library tokenizers cannot be loaded: {error}") from None
    if "refused" in answer:
        raise ConfigError(f"{file} cannot be read: {answer['refused']}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        add_tokens(backend, added)
    except Exception as error:  # the file has changed since
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return backend


def load_chat_template(
    folder: Path, settings: ConfigFields, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Load the template of a model's folder; None if it has none. Raises ConfigError.

    ``settings``: its tokenizer_config.json, which may have templates. Files of their own go first,
    as in transformers. A chat_template.json, which older processors of images saved, goes last.
    """
    sources = _template_files(folder) or _templates_in(settings)
    if not sources:
        sources = _templates_in(ConfigFields.read_if_any(folder / "chat_template.json"))
    tool_use = sources.get("tool_use")
    source = sources.get("default", tool_use)
    if source is None:
        return None
    for one in (source, tool_use):
        if one is not None and len(one.text) > MAX_SOURCE_CHARACTERS:
            raise ConfigError(f"{one.place} has more than {MAX_SOURCE_CHARACTERS} characters")
    try:
        return ChatTemplate(
            source.text, special_tokens, None if tool_use is None else tool_use.text
        )
    except ConfigError as error:
        places = " and ".join(dict.fromkeys(one.place for one in (source, tool_use) if one))
        raise ConfigError(f"{places}: {error.message}") from error


@dataclass(frozen=True, slots=True)
class _Source:
    place: str
    """The file of the template, and its field if there is one."""
    text: str


def _template_files(folder: Path) -> dict[str, _Source]:
    """Return the templates that have files of their own, by their names."""
    files = {"default": folder / "chat_template.jinja"}
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        files[file.name.removesuffix(".jinja")] = file
    return {name: _template_file(file) for name, file in files.items() if file.is_file()}


def _template_file(file: Path) -> _Source:
    if file.stat().st_size > 4 * MAX_SOURCE_CHARACTERS:
        raise ConfigError(f"{file} has more than {MAX_SOURCE_CHARACTERS} characters")
    try:
        return _Source(str(file), file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _templates_in(settings: ConfigFields) -> dict[str, _Source]:
    """Return the templates in ``chat_template`` of a file, by their names: a text, a list of
    objects with name and template, or an object with a template for each name."""
    value, place = settings.get("chat_template"), f"{settings.path}: chat_template"
    if isinstance(value, dict):
        fields = ConfigFields(
            settings.path, {f"chat_template.{name}": text for name, text in value.items()}
        )
        return {name: _Source(place, fields.text(f"chat_template.{name}")) for name in value}
    if not isinstance(value, list):
        text = settings.text("chat_template")
        return {"default": _Source(place, text)} if text else {}
    sources = {}
    for entry in value:
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{place} must be a text, or a list of objects with name and template; it has"
                f" {entry!r}"
            )
        fields = ConfigFields(settings.path, entry)
        sources[fields.text("name")] = _Source(place, fields.text("template"))
    return sources
