"""The fields of request bodies, and what becomes of those that a body has beyond them.

A name that is close to a known one is refused: a typo is not a default. Any other is left out,
since many clients have fields of their own. The log names it once an hour, and the answer in the
header ``x-baton-ignored``.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import UnsupportedParameter
from router.http.errors import from_validation

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-baton-ignored"
"""Header with the names of the request's fields that have no effect, separated by commas."""
MAX_SHOWN_CHARACTERS = 64
"""Maximum number of characters of an unknown field's name that is shown."""
MAX_UNKNOWN = 32
"""Maximum number of unknown fields of one body."""
MAX_SHOWN = 16
"""Maximum number of names in the header, and of fields that one error names."""
_LOG_S = 3600.0
_MAX_LOGGED = 256
"""Maximum number of names that are logged in an hour."""
_CLOSE, _CLOSE_SHORT, _SHORT = 0.8, 0.75, 4
"""Similarity from which a name counts as a typo of another; that of names of at most ``_SHORT``
characters, where one other character makes a greater difference."""
_FOREIGN = re.compile(r"[^0-9A-Za-z_.\-]")
_ignored: ContextVar[list[str] | None] = ContextVar("ignored fields", default=None)
Body = TypeVar("Body", bound=BaseModel)


class RequestBody(BaseModel):
    """Base class of request bodies, whose fields ``validate`` checks."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Names of further known fields, which do not change the answer."""
    checked: ClassVar[frozenset[str]] = frozenset()
    """Names of further fields, which other code checks."""
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Names of known fields that the answer would have to obey, and does not. Each has the values
    that are accepted since they request nothing. Null is accepted, too."""
    parts: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Fields that are objects, whose own fields are checked in the same way."""


class UnknownFields:
    """What becomes of the unknown fields of all bodies of a router process. Owned by its event
    loop."""

    def __init__(self, *, strict: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """``strict``: refuse them all."""
        self.strict = strict
        self._clock = clock
        self._since = clock()
        self._logged: set[str] = set()

    def take(self, names: Iterable[str]) -> None:
        """Log the names of fields that are left out."""
        if self._clock() - self._since >= _LOG_S:
            self._since = self._clock()
            self._logged.clear()
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                log.info("requests have the unknown field %s, which is ignored", name)


REFUSED = UnknownFields(strict=True)
"""For bodies of Baton's own endpoints, which have no fields of others."""


def collect_ignored() -> list[str]:
    """Return a list to which ``validate`` adds, from now on and in this context, the names of
    fields that have no effect."""
    names: list[str] = []
    _ignored.set(names)
    return names


def header_value(names: Iterable[str]) -> str:
    """Return the value of ``IGNORED_HEADER`` for the names of fields, which must be ``shown``."""
    sorted_names = sorted(set(names))
    more = len(sorted_names) - MAX_SHOWN
    return ", ".join(sorted_names[:MAX_SHOWN] + ([f"{more} more"] if more > 0 else []))


def validate(model: type[Body], value: dict[str, Any], unknown: UnknownFields = REFUSED) -> Body:
    """Validate a JSON object as a ``model``. Raises InvalidRequest with the names of bad fields.

    For a ``RequestBody``, raises UnsupportedParameter for unserved fields, and for unknown ones as
    ``unknown`` has it. A field that is null counts as absent.
    """
    foreign: list[str] = []
    if issubclass(model, RequestBody):
        foreign = _foreign(value, _known(model), unknown)
        for name, part in model.parts.items():
            if isinstance(given := value.get(name), dict):
                foreign += _foreign(given, frozenset(part.model_fields), unknown, f"{name}.")
    try:
        found = model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None
    if isinstance(found, RequestBody):
        _refuse_unserved(found, value)
        unknown.take(foreign)
        if (names := _ignored.get()) is not None:
            names += foreign
            names += [name for name in found.ignored & value.keys() if value[name] is not None]
    return found


def note_ignored(name: str) -> None:
    """Record that a field of the request, whatever its name, has no effect with its value."""
    if (names := _ignored.get()) is not None:
        names.append(shown(name))


def shown(name: str) -> str:
    """Return a client's name of a field, as it may stand in logs and headers."""
    return _FOREIGN.sub("?", name[:MAX_SHOWN_CHARACTERS])


@functools.cache
def _known(model: type[RequestBody]) -> frozenset[str]:
    return frozenset(model.model_fields).union(model.ignored, model.checked, model.unserved)


def _foreign(
    value: Mapping[str, Any], known: frozenset[str], unknown: UnknownFields, prefix: str = ""
) -> list[str]:
    """Return the unknown fields of an object, as they are shown. Raises UnsupportedParameter if
    some are typos, or are too many."""
    if value.keys() <= known:
        return []
    names = [name for name in value if name not in known and value[name] is not None]
    if len(names) > MAX_UNKNOWN:
        raise UnsupportedParameter(f"more than {MAX_UNKNOWN} fields of this request are unknown")
    refused = []
    for name in names:
        near = _near(name[:MAX_SHOWN_CHARACTERS], known)
        if near is not None or unknown.strict:
            hint = f"; did you mean '{prefix}{near}'?" if near else ": leave it out"
            refused.append((prefix + name[:MAX_SHOWN_CHARACTERS], hint))
    if refused:
        told = ". ".join(
            f"'{name}' is not a field of this request{hint}" for name, hint in refused[:MAX_SHOWN]
        )
        raise UnsupportedParameter(told, param=refused[0][0])
    return [prefix + shown(name) for name in names]


@functools.lru_cache(maxsize=1024)
def _near(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that ``name`` is close to, or None."""
    plain = {one.lower(): one for one in known}
    cutoff = _CLOSE_SHORT if len(name) <= _SHORT else _CLOSE
    near = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def _refuse_unserved(found: RequestBody, value: Mapping[str, Any]) -> None:
    names = [
        name
        for name, harmless in found.unserved.items()
        if value.get(name) is not None and not _is_one_of(value[name], harmless)
    ]
    if names:
        told = ". ".join(
            f"'{name}' is not supported with this value by this server" for name in names
        )
        raise UnsupportedParameter(told, param=names[0])


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True equals 1 in Python, but not in JSON.
    return any(
        value == candidate and isinstance(value, bool) == isinstance(candidate, bool)
        for candidate in harmless
    )
