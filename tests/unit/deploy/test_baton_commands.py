"""The tests of deployments can fail: what does not exist is found."""

from __future__ import annotations

import pytest

from tests.support.deploy.baton_commands import parse, unknown_variables


def test_what_exists_is_parsed_down_to_the_last_command() -> None:
    parsed = parse(["serve", "--config", "a.toml", "--prefill", "2"])
    assert (parsed.name, parsed.parameters["prefill"]) == ("serve", 2)
    assert parse(["model", "pull", "a"]).name == "pull"


@pytest.mark.parametrize(
    "arguments",
    [["serve", "--no-such-flag"], ["no-such-command"], ["model", "push"], ["serve", "a", "more"]],
)
def test_what_does_not_exist_is_refused(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|unexpected"):
        parse(arguments)


def test_unused_variables_are_found() -> None:
    names = ["BATON_HTTP", "BATON_CACHE_DIR", "PATH", "BATON_ADDRESS"]
    assert unknown_variables(names) == ["BATON_ADDRESS"]
