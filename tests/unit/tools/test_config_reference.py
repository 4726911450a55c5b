"""The page of the configuration describes every field and every option."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from baton.config.sources import variable_of
from deploy.cli.options.config_options import config_options
from deploy.cli.options.field_text import unit_of
from tools.reference.configuration import _LISTS, _SECTIONS, reference

NUMBERS = (int, float, int | None, float | None)


def rows(title: str) -> dict[str, dict[str, str]]:
    """The table below a heading, by the name of the field."""
    lines = reference().split(f"\n## {title}\n", 1)[1].split("\n## ")[0].splitlines()
    _, _, *body = (line for line in lines if line.startswith("|"))
    found = {}
    for line in body:
        names, kind, default, meaning = (cell.strip() for cell in line[1:-1].split("|"))
        place, name = re.match(r'<a id="([^"]+)"></a>`([^`]+)`', names).groups()  # type: ignore[union-attr]
        row = {"names": names, "type": kind, "default": default, "meaning": meaning}
        found[name] = {**row, "place": place}
    return found


@pytest.mark.parametrize(
    ("title", "model", "path"), [(title, model, path) for title, _, model, path in _SECTIONS]
)
def test_every_field_has_a_type_a_default_a_unit_and_a_meaning(
    title: str, model: type[BaseModel], path: tuple[str, ...]
) -> None:
    found = rows(title)
    assert set(found) == set(model.model_fields)
    for name, row in found.items():
        assert row["type"], name
        assert row["default"], name
        assert row["meaning"].endswith("."), name
        assert row["place"] == ".".join((*path, name))
        is_number = model.model_fields[name].annotation in NUMBERS
        assert bool(unit_of(name)) is is_number, name
        assert row["type"].endswith(f", {unit_of(name)}") is is_number, name
        has_variable = f"`{variable_of((*path, name))}`" in row["names"]
        assert has_variable is not (bool(path) and path[0] in _LISTS), name


def test_types_are_plain_words() -> None:
    for title, *_ in _SECTIONS:
        for row in rows(title).values():
            leaks = re.findall(r"Literal|None\b|\w+\[|\bstr\b|\bint\b|\bbool\b", row["type"])
            assert leaks == [], row
    choices = rows("The cluster")["log_level"]["type"]
    assert choices == "one of `debug`, `info`, `warning`, `error`"


def test_every_option_is_on_the_page() -> None:
    shown = set(re.findall(r"`(--[a-z-]+)[ `]", reference()))
    options = {option.flags[0] for option in config_options() if option.panel}
    assert options <= shown
    others = {"--help-all", "--config", "--help", "--model", "--no-log-requests", "--api-key-file"}
    assert shown - options <= others
