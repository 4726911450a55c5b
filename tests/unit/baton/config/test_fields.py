"""Old names of fields: refused in files, in the environment and as flags, with the new name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from baton.config.cluster import Config, load_config
from baton.config.fields import REMOVED, RENAMED
from baton.config.sources import unknown_variables
from baton.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)


def faults(file: Path | None = None, **values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, **values)
    return caught.value.message.splitlines()


def has_field(path: tuple[str, ...]) -> bool:
    model: type[BaseModel] = Config
    for part in path[:-1]:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        model = annotation
    return path[-1] in model.model_fields


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=".".join)
def test_an_old_name_in_a_file_is_refused_with_the_new_one(
    tmp_path: Path, old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    assert has_field(new)
    assert not has_field(old)
    table = f"[{old[0]}]\n" if len(old) == 2 else ""
    file = tmp_path / "baton.toml"
    file.write_text(f"{table}{old[-1]} = 1\n")
    assert faults(file) == [f"{file}:{len(old)}: `{'.'.join(old)}` is now `{'.'.join(new)}`"]


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=".".join)
def test_an_old_variable_is_refused_with_the_new_one(
    monkeypatch: pytest.MonkeyPatch, old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    variable, instead = (f"BATON_{'__'.join(path).upper()}" for path in (old, new))
    monkeypatch.setenv(variable, "1")
    assert faults() == [f"{variable} is now {instead}"]
    assert unknown_variables(Config) == []


@pytest.mark.parametrize("old", REMOVED, ids=".".join)
def test_a_field_that_is_gone_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: tuple[str, ...]
) -> None:
    assert not has_field(old)
    table = f"[{old[0]}]\n" if len(old) == 2 else ""
    file = tmp_path / "baton.toml"
    file.write_text(f"{table}{old[-1]} = 1\n")
    (line,) = faults(file)
    assert f"`{'.'.join(old)}` was removed: {REMOVED[old]}. Delete it" in line
    variable = f"BATON_{'__'.join(old).upper()}"
    monkeypatch.setenv(variable, "1")
    (line,) = faults()
    assert line == f"{variable} was removed: {REMOVED[old]}. Delete it"


def test_an_old_name_among_values_is_refused() -> None:
    assert faults(lease_s=3.0) == ["`lease_s` is now `advanced.lease_s`"]
