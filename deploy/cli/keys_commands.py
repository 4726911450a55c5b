"""`baton keys`: creates, lists, rotates and revokes API keys."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from baton.config.choices import BudgetPeriod
from deploy.cli.options.choices import Scope
from deploy.cli.options.command_line import clear_errors, fail, say
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.output import Output, print_json, print_table

if TYPE_CHECKING:
    from baton.config.access import KeyConfig

File = Annotated[
    Path,
    typer.Option(
        envvar="BATON_KEYS_FILE",
        metavar="FILE",
        help="File of API keys, as --keys-file of `baton serve` names it.",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the key, which metrics and logs show.")]
Lifetime = Annotated[
    str | None,
    typer.Option(metavar="30d|12h|45m", help="Lifetime of the key. Default: unlimited."),
]
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def create(
    name: Name,
    file: File,
    scope: Annotated[
        list[Scope],
        typer.Option(help="What the key allows; repeatable. admin allows everything."),
    ] = [Scope.INFERENCE],  # noqa: B006 - typer copies it
    tenant: Annotated[
        str, typer.Option(help="Tenant of the key's requests. Tenants share no cached prompts.")
    ] = "default",
    priority: Annotated[
        int, typer.Option(help="Priority of requests that set none; lower numbers run sooner.")
    ] = 0,
    requests_per_minute: Annotated[
        int, typer.Option(min=0, help="Maximum number of requests per minute; 0 is unlimited.")
    ] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, help="Maximum number of tokens per minute; 0 is unlimited.")
    ] = 0,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Maximum number of concurrent requests; 0 is unlimited.")
    ] = 0,
    budget: Annotated[
        float, typer.Option(min=0, metavar="$", help="Maximum cost per period; 0 is unlimited.")
    ] = 0,
    budget_period: Annotated[BudgetPeriod, typer.Option(help="Period of the budget.")] = "month",
    expires_in: Lifetime = None,
) -> None:
    """Create a key and print it.

    It is shown only once: the file holds its hash. Running routers accept it within two seconds.

        baton keys create alice --file keys.json --scope inference --scope metrics
    """
    from pydantic import ValidationError  # noqa: PLC0415

    from baton.config.access import KeyConfig  # noqa: PLC0415
    from baton.config.errors import plain_faults  # noqa: PLC0415
    from baton.config.keys_file import changing, hash_of, new_key, write_keys  # noqa: PLC0415

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
            budget=budget,
            budget_period=budget_period,
            scopes=tuple(one.value for one in Scope if one in scope),
            expires_at=None if expires_in is None else _later(expires_in),
        )
    except ValidationError as error:
        fail(*plain_faults(error, KeyConfig))
    with clear_errors(), _writable(file), changing(file):
        keys = _keys(file)
        if any(one.name == name for one in keys):
            fail(f"key {name!r} exists: choose another name, or revoke or rotate it")
        write_keys(file, [*keys, made])
    typer.echo(key)
    say("Keep it: it is shown only once. Clients send it as Authorization: Bearer KEY.")


def list_keys(file: File, output: Output = "table") -> None:
    """List the keys of a file: names, scopes, limits and expiry."""
    with clear_errors():
        keys = _keys(file)
    if output == "json":
        print_json({"keys": [_document(key) for key in keys]})
        return
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
    print_table(shown)


def revoke(name: Name, file: File) -> None:
    """Delete a key.

    Routers refuse it within two seconds. Requests that it has started end normally.
    """
    from baton.config.keys_file import changing, write_keys  # noqa: PLC0415

    with clear_errors(), _writable(file), changing(file):
        keys = _keys(file)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            fail(f"{file} has no key {name!r}")
        write_keys(file, left)
    say(f"{name} is revoked")


def rotate(
    name: Name,
    file: File,
    keep: Annotated[
        str, typer.Option(metavar="30d|12h|45m", help="Time for which the old key stays valid.")
    ] = "24h",
) -> None:
    """Replace a key with a new one and print it.

    The old key stays valid for the time of --keep, with the same limits, and is listed under
    another name.

        baton keys rotate alice --file keys.json --keep 12h
    """
    from baton.config.keys_file import changing, hash_of, new_key, write_keys  # noqa: PLC0415

    key, ends = new_key(), _later(keep)
    with clear_errors(), _writable(file), changing(file):
        keys = {one.name: one for one in _keys(file)}
        old = keys.get(name)
        if old is None:
            fail(f"{file} has no key {name!r}")
        aside = f"{name[:40]}.until-{ends:%Y%m%dT%H%M%S}"
        if aside in keys:
            fail(f"key {aside!r} exists: revoke it first")
        if old.expires_at is not None:
            ends = min(ends, old.expires_at)
        keys[name] = old.model_copy(update={"sha256": hash_of(key)})
        keys[aside] = old.model_copy(update={"name": aside, "expires_at": ends})
        write_keys(file, list(keys.values()))
    typer.echo(key)
    say(f"The old key is {aside} now, and expires at {ends:%Y-%m-%d %H:%M} UTC.")


def _keys(file: Path) -> list[KeyConfig]:
    from baton.config.keys_file import read_keys  # noqa: PLC0415

    return list(read_keys(file)) if file.exists() else []


@contextmanager
def _writable(file: Path) -> Iterator[None]:
    """End the command with a message if the code within raises OSError, because ``file`` cannot be
    written."""
    try:
        yield
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror or error}")


def _later(text: str) -> datetime.datetime:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([dhms])", text)
    if found is None:
        fail(f"expected a time such as 30d, 12h or 45m; got {text!r}", code=ExitCode.USAGE)
    span = datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})
    return _now().replace(microsecond=0) + span


def _document(key: KeyConfig) -> dict[str, Any]:
    """Return a JSON document that describes an API key; docs/reference/command-line.md lists the
    fields.

    Of the key's hash, the document has only the beginning.
    """
    return {
        "name": key.name,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "priority": key.priority,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrency": key.concurrency,
        "budget": key.budget,
        "budget_period": key.budget_period,
        "expires_at": None if key.expires_at is None else key.expires_at.isoformat(),
        "expired": key.expires_at is not None and key.expires_at <= _now(),
        "sha256_prefix": key.sha256[:12],
    }


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _limits(key: KeyConfig) -> str:
    limits = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.concurrency, "at a time"),
    )
    shown = [f"{most} {what}" for most, what in limits if most]
    if key.budget:
        shown.append(f"${key.budget:g}/{key.budget_period}")
    return ", ".join(shown) or "-"


def _expiry(key: KeyConfig) -> str:
    if key.expires_at is None:
        return "never"
    ended = key.expires_at <= _now()
    return f"{key.expires_at:%Y-%m-%d %H:%M} UTC{' (expired)' if ended else ''}"
