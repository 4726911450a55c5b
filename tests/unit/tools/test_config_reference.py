"""docs/reference/configuration.md says what baton/config says, of every field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from baton.config.sources import variable_of
from deploy.cli.options.config_options import config_options
from deploy.cli.options.field_text import unit_of
from tools.config_reference import _SECTIONS, reference

PAGE = Path(__file__).parents[3] / "docs/reference/configuration.md"
NUMBERS = (int, float, int | None, float | None)


def rows(title: str) -> dict[str, dict[str, str]]:
    """The table below a heading, by the name of the field."""
    lines = reference().split(f"\n## {title}\n", 1)[1].split("\n## ")[0].splitlines()
    head, _, *body = (line for line in lines if line.startswith("|"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    table = {}
    for line in body:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == len(columns), line
        row = dict(zip(columns, cells, strict=True))
        table[row["field"].strip("`")] = row
    return table


def test_the_page_is_what_the_code_says() -> None:
    hint = "run: python -m tools.config_reference > docs/reference/configuration.md"
    assert PAGE.read_text() == reference(), hint


@pytest.mark.parametrize(
    ("title", "model", "path"), [(title, model, path) for title, _, model, path in _SECTIONS]
)
def test_every_field_has_a_type_a_default_a_unit_and_a_meaning(
    title: str, model: type[BaseModel], path: tuple[str, ...]
) -> None:
    table = rows(title)
    assert set(table) == set(model.model_fields)
    for name, row in table.items():
        assert row["type"], name
        assert row["default"], name
        assert row["meaning"].endswith("."), name
        is_number = model.model_fields[name].annotation in NUMBERS
        assert bool(row["unit"]) is is_number, name
        assert row["unit"] == unit_of(name)
        if "variable" in row:
            assert row["variable"] == f"`{variable_of((*path, name))}`"


def test_every_option_is_on_the_page() -> None:
    shown = set(re.findall(r"`(--[a-z-]+)[ `]", reference()))
    options = {option.flags[0] for option in config_options() if option.panel}
    assert options <= shown
    others = {"--help-all", "--config", "--help", "--model", "--no-log-requests", "--api-key-file"}
    assert shown - options <= others
