"""Fields of a model's JSON files, which are checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a JSON object, which was read from ``path``. A null field counts as absent. Its
    methods raise ConfigError."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(path, values)

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
