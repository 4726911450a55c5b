"""Where requests go."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from loadtest.generator.targets.http_connection import Origin


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8000", Origin("127.0.0.1", 8000, False, "")),
        ("http://host/api/", Origin("host", 80, False, "/api")),
        ("https://host", Origin("host", 443, True, "")),
        ("http://[::1]:8000", Origin("::1", 8000, False, "")),
    ],
)
def test_urls(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin


def test_the_authority() -> None:
    assert Origin.parse("http://[::1]:8000").authority == "[::1]:8000"
    assert Origin.parse("http://host").authority == "host:80"


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://host:x", "http://h?q"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="not a URL"):
        Origin.parse(url)
