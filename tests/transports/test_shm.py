"""kvtransfer/transports/shm_transport.py does what every transport does."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from kvtransfer.transports.in_place import host_of
from tests.support.kvtransfer.conformance import TransportConformance
from tests.support.kvtransfer.ends import SHM_FOLDER


class TestShm(TransportConformance):
    transport = "shm"


class TestShmBetweenContainers(TransportConformance):
    """The same through sockets in a folder. Each end seems to be in a container of its own."""

    transport = "shm"

    @pytest.fixture(autouse=True)
    def containers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SHM_FOLDER, str(tmp_path))
        numbers = count()

        def another(transport: str) -> tuple[str, str]:
            return host_of(transport)[0], f"container {next(numbers)}"

        monkeypatch.setattr("kvtransfer.transports.shm_transport.host_of", another)
