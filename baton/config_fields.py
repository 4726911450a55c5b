"""Fields of a model's JSON files, which are checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

MAX_VOCAB = 1 << 24
"""Maximum number of token ids of a model. The largest published vocabularies have 2^18."""
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a JSON object, which was read from ``path``. A null field counts as absent. Its
    methods raise ConfigError."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        """Read a file. Raises ConfigError for a file that is not a JSON object, or has more than
        16 MiB."""
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(path, values)

    @classmethod
    def read_if_any(cls, path: Path) -> ConfigFields:
        """Read a file as ``read`` does. A file that does not exist has no fields."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def over(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """Return a copy in which absent fields have the values of ``defaults``. A null field stays
        null."""
        return ConfigFields(self.path, {**defaults, **self.values})

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer field, which must be 1 or more; ``default`` if the field is absent."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.path}: {name} must be a positive integer, and is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.path}: {name} must be a number above 0, and is {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float:
        """Return a number field, which must be above 0; 0 if the field is absent."""
        return 0.0 if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {name} must be true or false, and is {value!r}")
        return value

    def list(self, name: str, length: int | None = None) -> tuple[Any, ...]:
        """Return a list field, which must have ``length`` entries if that is given; empty if the
        field is absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise ConfigError(f"{self.path}: {name} must be a list, and is {value!r}")
        if length is not None and len(value) != length:
            raise ConfigError(
                f"{self.path}: {name} has {len(value)} entries, and must have {length}"
            )
        return tuple(value)

    def object(self, name: str) -> ConfigFields:
        """Return a field that is itself a JSON object; an empty object if the field is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {name} must be an object, and is {value!r}")
        return ConfigFields(self.path, value)

    def text(self, name: str) -> str:
        """Return a text field; empty if the field is absent."""
        value = self.get(name, "")
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {name} must be a text, and is {value!r}")
        return value

    def vocab_size(self) -> int | None:
        """Return the number of token ids; None if the field is absent."""
        if self.get("vocab_size") is None:
            return None
        size = self.size("vocab_size")
        if size > MAX_VOCAB:
            raise ConfigError(f"{self.path}: vocab_size {size} exceeds {MAX_VOCAB}")
        return size

    def context_length(self, default: int) -> int:
        """Return the number of tokens of the context, which linear and dynamic rotary scaling
        extend by their factor, as in vLLM; ``default``, extended, if ``max_position_embeddings`` is
        absent.

        Other scalings, and Gemma 3, have the extended length in ``max_position_embeddings``.
        """
        own = self.size("max_position_embeddings", default)
        scaling, parameters = self.object("rope_scaling"), self.object("rope_parameters")
        rope = scaling if scaling.values else parameters
        kind = rope.get("rope_type") or rope.get("type")
        if kind not in {"linear", "dynamic"} or self.text("model_type").startswith("gemma3"):
            return own
        return int(own * rope.number("factor"))

    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids of tokens that end an answer, one id or a list in the file; empty if the
        field is absent."""
        value = self.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        for one in ids:
            if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < MAX_VOCAB:
                raise ConfigError(
                    f"{self.path}: eos_token_id must be token ids (0 to {MAX_VOCAB - 1}), and has"
                    f" {one!r}"
                )
        return tuple(ids)
