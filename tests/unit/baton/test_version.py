"""Which Baton this is, installed or not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from baton.version import baton_version


def test_it_is_that_of_the_installed_package() -> None:
    assert baton_version() == version("baton")


def test_a_source_tree_that_is_not_installed_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("baton.version.version", absent)
    assert baton_version() == "0+unknown"
