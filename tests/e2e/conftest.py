from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import UpProcess


@pytest.fixture(scope="session")
def cluster() -> Iterator[UpProcess]:
    """A cluster with the demo model in its default type, shared by all tests: leave it as it is."""
    with UpProcess() as up:
        yield up.wait_ready()
        up.terminate()
        assert up.wait() == 0, up.text
