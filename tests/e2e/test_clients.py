"""Third-party clients, each in an environment of its own, against a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from baton.errors import ConfigError
from tests.clients.checking import Outcome, check, chosen
from tests.clients.environments import ClientProgram, install
from tests.support.e2e.cluster import UpProcess

pytestmark = pytest.mark.timeout(900)
"""A fresh machine installs them first."""
SIDE_BY_SIDE = 2
"""They spend their time on imports more than on answers."""
OFFICIAL = ("openai-3", "anthropic")
"""The one that most others are built on, and one that speaks a dialect of its own."""


@pytest.fixture(scope="module")
def checking(
    cluster: UpProcess, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[list[Outcome]]]]:
    """The checks of those clients whose tests are to run."""
    asked = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}

    def installed(program: ClientProgram) -> list[Outcome]:
        install(program)
        return check(program, cluster.http, cluster.model, "")

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {
            program.name: pool.submit(installed, program)
            for program in chosen("light")
            if program.name in asked
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(program.name, marks=() if program.name in OFFICIAL else pytest.mark.long)
        for program in chosen("light")
    ],
)
def test_a_client_passes_all_of_its_checks(
    checking: dict[str, Future[list[Outcome]]], name: str
) -> None:
    try:
        outcomes = checking[name].result()
    except ConfigError as error:
        pytest.skip(f"{name} cannot be installed here: {error.message}")
    assert [one for one in outcomes if one.outcome != "pass"] == []
    assert outcomes
