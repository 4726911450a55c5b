"""Fixtures of the tests of `baton`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from typer.main import get_command


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """An app's tree of commands takes 24 ms to make, and tests run hundreds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield
