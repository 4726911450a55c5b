"""Sources of configuration values: flags, the environment, a TOML file.

Each source defines how an error names a value: ``--policy``, ``BATON_POLICY``, ``baton.toml:3``.
"""

from __future__ import annotations

import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from baton.config.fields import REMOVED, RENAMED, advice
from baton.errors import ConfigError

PREFIX = "BATON_"
_OTHER_VARIABLES = frozenset(
    {
        "API_KEY",
        "CA",
        "CACHE_DIR",
        "CERTIFICATE",
        "CERTIFICATE_KEY",
        "NODE_PLACES",
        "RUN_DIRECTORY",
    }
)
"""Variables of Baton's commands and processes that are not fields, without the prefix."""
_CLOSE = 0.8
"""Minimum similarity of an unknown variable and a field for a warning, from 0 to 1."""


def variable_of(field: Iterable[str]) -> str:
    """The environment variable of a field: ``BATON_TLS__FOLDER``."""
    return PREFIX + "__".join(field).upper()


PoolsOf = Literal["", "all", "prefill", "decode"]
"""Tables that a flag changes: the cluster's, those of all pools, or the only pool of a role."""
Location = tuple[str | int, ...]
"""Path of a value in the configuration: ``("pools", 0, "count")``."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A value from the command line."""

    name: str
    """The flag as the user types it: ``--policy``."""
    field: tuple[str, ...]
    """The field that the flag sets: ``("policy",)``, ``("tls", "folder")``; with ``pools`` a field
    of a pool."""
    value: Any
    pools: PoolsOf = ""


class Source(Protocol):
    """One place that values come from."""

    values: dict[str, Any]
    """The raw values, by field."""

    def name_of(self, location: Location) -> str:
        """Return how an error names the value at ``location``, which this source has."""
        ...


class FlagSource:
    """The command line. Flags for fields of pools change the pools of other sources."""

    def __init__(self, flags: Iterable[Flag], pools: Sequence[Any]) -> None:
        """``pools`` are the tables of pools in the other sources, as written there."""
        self.values: dict[str, Any] = {}
        self.faults: list[str] = []
        self._names: dict[Location, str] = {}
        for flag in flags:
            for location in self._locations(flag, pools):
                self._put(location, flag)

    def name_of(self, location: Location) -> str:
        """Return the flags that set the value, a part of it, or the table around it."""
        names = [
            name
            for where, name in self._names.items()
            if all(one == other for one, other in zip(where, location, strict=False))
        ]
        return " and ".join(dict.fromkeys(names))

    def sets(self, location: Location) -> bool:
        """Whether there is a flag for exactly this value."""
        return location in self._names

    def _locations(self, flag: Flag, pools: Sequence[Any]) -> list[Location]:
        if not flag.pools:
            return [flag.field]
        tables = [(n, pool) for n, pool in enumerate(pools) if isinstance(pool, dict)]
        if flag.pools == "all":
            return [("pools", n, *flag.field) for n, _ in tables]
        own = [(n, pool) for n, pool in tables if pool.get("role") == flag.pools]
        if len(own) > 1:
            names = ", ".join(str(pool.get("name")) for _, pool in own)
            self.faults.append(
                f"{flag.name} needs a single {flag.pools} pool, and the configuration has {names}:"
                " set it there, for each pool"
            )
            return []
        return [("pools", n, *flag.field) for n, _ in own]

    def _put(self, location: Location, flag: Flag) -> None:
        within: dict[Any, Any] = self.values
        for part in location[:-1]:
            within = within.setdefault(part, {})
        within[location[-1]] = flag.value
        self._names[location] = flag.name


class EnvironmentSource:
    """Environment variables: ``BATON_`` and the field's name in capitals.

    ``__`` separates a table and its field.
    """

    def __init__(self, settings: type[BaseSettings]) -> None:
        self.faults: list[str] = []
        reader = EnvSettingsSource(settings)
        old = {name: fault for name, fault in _old_variables() if name in reader.env_vars}
        self.faults.extend(old.values())
        reader.env_vars = {k: v for k, v in reader.env_vars.items() if k not in old}
        while True:
            try:
                self.values = reader()
                return
            except SettingsError as error:
                field = re.search(r'field "(\w+)"', str(error))
                name = f"{PREFIX}{field[1]}".lower() if field else ""
                if name not in reader.env_vars:
                    raise
                cause = f": {error.__cause__}" if error.__cause__ else ""
                self.faults.append(f"{name.upper()} must be JSON{cause}")
                reader.env_vars = {k: v for k, v in reader.env_vars.items() if k != name}

    def name_of(self, location: Location) -> str:
        """Return the variable that has the value, or the table around it."""
        parts = [part.upper() for part in location if isinstance(part, str)]
        given = {name.upper() for name in os.environ}
        for size in range(len(parts), 0, -1):
            if (name := PREFIX + "__".join(parts[:size])) in given:
                return name
        # Only fields of the table are set.
        start = PREFIX + "__".join(parts)
        return " and ".join(sorted(name for name in given if name.startswith(f"{start}__")))


def _old_variables() -> Iterator[tuple[str, str]]:
    """Yield, for each variable of an old name, its name in lower case and what to do instead."""
    for old in (*RENAMED, *REMOVED):
        new = RENAMED.get(old)
        instead = f"is now {variable_of(new)}" if new else advice(old)
        yield variable_of(old).lower(), f"{variable_of(old)} {instead}"


class FileSource:
    """A TOML file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError where it cannot be read, or is not TOML."""
        self._path = path
        try:
            self._text = path.read_text(encoding="utf-8")
            self.values: dict[str, Any] = tomllib.loads(self._text)
        except FileNotFoundError:
            raise ConfigError(f"no configuration file at {path}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None

    def name_of(self, location: Location) -> str:
        """Return the file, and the line in which the value begins."""
        return f"{self._path}:{self._line_of(location)}"

    def _line_of(self, location: Location) -> int:
        """Return the line at which the value begins.

        Each statement is parsed with the lines before it, until the value is there. The lines of
        one statement count together, since none of them parses without the last.
        """
        lines = self._text.split("\n")

        def has_value_after(count: int) -> bool:
            for size in range(count, len(lines) + 1):
                try:
                    return has(tomllib.loads("\n".join(lines[:size])), location)
                except tomllib.TOMLDecodeError:
                    continue
            return True

        return bisect_left(range(len(lines) + 1), True, key=has_value_after)


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources together."""

    in_order: tuple[Source, ...]
    """The sources, highest precedence first."""
    values: dict[str, Any]
    """Values of all sources together, each from the source with the highest precedence."""
    faults: tuple[str, ...]
    """Sources that could not be read; the rest can be checked without them."""

    @classmethod
    def read(
        cls,
        settings: type[BaseSettings],
        file: Path | None,
        flags: Iterable[Flag],
        default_pools: Sequence[Any],
    ) -> Sources:
        """Read all sources. ``default_pools``: what flags for pools change where no source has
        pools.

        Raises ConfigError where the file cannot be read at all.
        """
        environment = EnvironmentSource(settings)
        below: tuple[Source, ...] = (environment,)
        if file is not None:
            below = (environment, FileSource(file))
        values: dict[str, Any] = {}
        for source in reversed(below):
            values = _merge(values, source.values)
        flags = list(flags)
        # Flags for fields of pools change the pools of a flag too.
        whole = FlagSource((flag for flag in flags if flag.field == ("pools",)), ())
        values = _merge(values, whole.values)
        pools = values.get("pools", default_pools)
        fields = (flag for flag in flags if flag.field != ("pools",))
        given = FlagSource(fields, pools if isinstance(pools, list | tuple) else ())
        if "pools" in given.values:
            values = {**values, "pools": pools}
        values = _merge(values, given.values)
        return cls((given, whole, *below), values, (*given.faults, *environment.faults))

    def of(self, location: Location, *, is_table: bool = False) -> Source | None:
        """Return the source whose value at ``location`` counts; None where it is a default.

        ``is_table``: ``location`` is the table itself. Flags for its fields do not set it.
        """
        sources = self.in_order[1:] if is_table else self.in_order
        return next((one for one in sources if has(one.values, location)), None)


def has(values: Any, location: Location) -> bool:
    """Whether there is a value at ``location``."""
    for part in location:
        if isinstance(values, Mapping):
            found = part in values
        else:
            is_list = isinstance(values, list | tuple)
            found = is_list and isinstance(part, int) and part < len(values)
        if not found:
            return False
        values = values[part]
    return True


def unknown_variables(settings: type[BaseSettings]) -> list[str]:
    """A warning for each variable that looks like a misspelled field. Baton does not read it."""
    fields = {name.upper() for name in settings.model_fields}
    # The variables of old names are errors.
    known = fields | _OTHER_VARIABLES | {old[0].upper() for old in (*RENAMED, *REMOVED)}
    warnings = []
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(PREFIX)
        if name == variable.upper() or name.partition("__")[0] in known:
            continue
        close = get_close_matches(name.partition("__")[0], sorted(fields), 1, _CLOSE)
        if close:
            rest = "".join(name.partition("__")[1:])
            warnings.append(
                f"the environment variable {variable} is unknown and has no effect; did you mean"
                f" {PREFIX}{close[0]}{rest}?"
            )
    return warnings


def _merge(below: Any, above: Any) -> Any:
    """Merge ``above`` over ``below``: tables are merged, and numbered tables change list
    entries."""
    if isinstance(below, dict) and isinstance(above, dict):
        changed = {key: _merge(below.get(key), value) for key, value in above.items()}
        return {**below, **changed}
    numbered = isinstance(above, dict) and all(isinstance(key, int) for key in above)
    if isinstance(below, list | tuple) and numbered:
        return [_merge(one, above[n]) if n in above else one for n, one in enumerate(below)]
    return above
