"""Clients that nobody here wrote, each in an environment of its own, against a cluster."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from loadtest.clients.checking import check, chosen
from loadtest.clients.environments import ClientProgram, install
from tests.e2e.cluster import UpProcess

pytestmark = pytest.mark.timeout(900)
"""A fresh machine installs them first."""


@pytest.mark.parametrize("program", chosen("light"), ids=lambda program: program.name)
def test_a_client_passes_all_of_its_checks(cluster: UpProcess, program: ClientProgram) -> None:
    try:
        install(program)
    except ConfigError as error:
        pytest.skip(f"{program.name} cannot be installed here: {error.message}")
    outcomes = check(program, cluster.http, cluster.model, "")
    assert [one for one in outcomes if one.outcome != "pass"] == []
    assert outcomes
