"""The version stands in one place, and what cannot read it there has the same one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from baton.version import VERSION

ROOT = Path(__file__).parents[3]


def test_the_project_takes_its_version_from_the_module() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    attribute = settings["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "baton.version.VERSION"
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_chart_has_the_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/baton/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    values = yaml.safe_load((ROOT / "deploy/helm/baton/ci/standalone-values.yaml").read_text())
    assert values["image"]["tag"] == f"{VERSION}-cuda"
