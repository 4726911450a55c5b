"""`baton keys`: makes API keys, lists them, takes them away."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from deploy.command_line import clear_errors, fail, say

if TYPE_CHECKING:
    from baton.config import KeyConfig, Scope

File = Annotated[
    Path,
    typer.Option(
        envvar="BATON_KEYS_FILE",
        metavar="FILE",
        help="The file of keys, as for `baton up --keys-file`.",
    ),
]
Name = Annotated[str, typer.Argument(help="Its public name, for metrics and logs.")]
Lifetime = Annotated[
    str | None, typer.Option(metavar="30d|12h|45m", help="When it ends. Default: never.")
]
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def create(
    name: Name,
    file: File,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it may do, once for each: inference, metrics, admin (which is all)."
            " Default: inference."
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="On whose behalf its requests run: who shares a cache.")
    ] = "default",
    priority: Annotated[int, typer.Option(help="Of requests that give none; lower is sooner.")] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: unlimited.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="0: unlimited.")] = 0,
    concurrency: Annotated[int, typer.Option(min=0, help="Requests at a time; 0: unlimited.")] = 0,
    expires_in: Lifetime = None,
) -> None:
    """Make a key and print it, this once: the file has its hash alone.

    Routers that run find it within a second or two.
    """
    from pydantic import ValidationError  # noqa: PLC0415

    from baton.config import KeyConfig  # noqa: PLC0415
    from baton.config_errors import plain_faults  # noqa: PLC0415
    from baton.keys_file import changing, hash_of, new_key, write_keys  # noqa: PLC0415

    key = new_key()
    try:
        made = KeyConfig(
            name=name,
            sha256=hash_of(key),
            tenant=tenant,
            priority=priority,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrency=concurrency,
            scopes=_scopes(scope or ["inference"]),
            expires_at=None if expires_in is None else _later(expires_in),
        )
    except ValidationError as error:
        fail(*plain_faults(error, KeyConfig))
    with clear_errors(), _writable(file), changing(file):
        keys = _keys(file)
        if any(one.name == name for one in keys):
            fail(f"there is a key {name!r} already: choose another name, or revoke or rotate it")
        write_keys(file, [*keys, made])
    typer.echo(key)
    say("Keep it: it is shown this once. Clients send it as Authorization: Bearer KEY.")


def list_keys(file: File) -> None:
    """Show the keys of a file: their names and what they may do."""
    with clear_errors():
        keys = _keys(file)
    shown = Table(box=None, pad_edge=False)
    for column in ("name", "tenant", "scopes", "limits", "expires", "sha256"):
        shown.add_column(column, no_wrap=True)
    for key in keys:
        shown.add_row(
            key.name,
            key.tenant,
            ", ".join(key.scopes),
            _limits(key),
            _expiry(key),
            f"{key.sha256[:12]}…",
        )
    Console().print(shown)


def revoke(name: Name, file: File) -> None:
    """Take a key away. Routers refuse it within a second or two; what it has begun goes on."""
    from baton.keys_file import changing, write_keys  # noqa: PLC0415

    with clear_errors(), _writable(file), changing(file):
        keys = _keys(file)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            fail(f"there is no key {name!r} in {file}")
        write_keys(file, left)
    say(f"{name} is revoked")


def rotate(
    name: Name,
    file: File,
    keep: Annotated[
        str, typer.Option(metavar="30d|12h|45m", help="How long the old one works on beside it.")
    ] = "24h",
) -> None:
    """Make a new key for an entry, and print it; the old one works on for a while.

    The old one has another name until then, and limits of its own.
    """
    from baton.keys_file import changing, hash_of, new_key, write_keys  # noqa: PLC0415

    key, ends = new_key(), _later(keep)
    with clear_errors(), _writable(file), changing(file):
        keys = {one.name: one for one in _keys(file)}
        old = keys.get(name)
        if old is None:
            fail(f"there is no key {name!r} in {file}")
        aside = f"{name[:40]}.until-{ends:%Y%m%dT%H%M%S}"
        if aside in keys:
            fail(f"there is a key {aside!r} already: revoke it first")
        if old.expires_at is not None:
            ends = min(ends, old.expires_at)
        keys[name] = old.model_copy(update={"sha256": hash_of(key)})
        keys[aside] = old.model_copy(update={"name": aside, "expires_at": ends})
        write_keys(file, list(keys.values()))
    typer.echo(key)
    say(f"The old one is {aside} now, and ends at {ends:%Y-%m-%d %H:%M} UTC.")


def _keys(file: Path) -> list[KeyConfig]:
    from baton.keys_file import read_keys  # noqa: PLC0415

    return list(read_keys(file)) if file.exists() else []


@contextmanager
def _writable(file: Path) -> Iterator[None]:
    """Says what is wrong where the file cannot be written."""
    try:
        yield
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror or error}")


def _scopes(given: list[str]) -> tuple[Scope, ...]:
    from baton.config import Scope  # noqa: PLC0415

    known: tuple[Scope, ...] = get_args(Scope)
    for name in given:
        if name not in known:
            fail(f"there is no scope {name!r}: there are {', '.join(known)}")
    return tuple(scope for scope in known if scope in given)


def _later(text: str) -> datetime.datetime:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([dhms])", text)
    if found is None:
        fail(f"{text!r} is no time, as in 30d, 12h or 45m")
    span = datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0) + span


def _limits(key: KeyConfig) -> str:
    limits = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.concurrency, "at a time"),
    )
    return ", ".join(f"{most} {what}" for most, what in limits if most) or "-"


def _expiry(key: KeyConfig) -> str:
    if key.expires_at is None:
        return "never"
    ended = key.expires_at <= datetime.datetime.now(datetime.UTC)
    return f"{key.expires_at:%Y-%m-%d %H:%M} UTC{' (ended)' if ended else ''}"
