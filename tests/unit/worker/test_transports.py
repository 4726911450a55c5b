"""Which transports a worker has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from baton.config import Config, TransportName
from baton.errors import ConfigError
from kvtransfer.host_memory import HostMemory
from kvtransfer.negotiation import TRANSPORTS
from kvtransfer.shared_pool import allocate
from worker import transports as transports_module
from worker.transports import make_transports

SHAPE = 2, 64


@pytest.fixture
def names() -> Iterator[Callable[[TransportName, HostMemory], list[str]]]:
    """Makes transports, and tells their names."""
    with ThreadPoolExecutor(1) as executor, ExitStack() as stack:

        def make(wanted: TransportName, memory: HostMemory) -> list[str]:
            made = make_transports(
                Config(transport=wanted), memory, "decode-0:1", "127.0.0.1", executor
            )
            for transport in made:
                stack.callback(transport.close)
            return [transport.name for transport in made]

        yield make


@pytest.fixture
def shared() -> Iterator[HostMemory]:
    """Memory that others can map."""
    pool = allocate(SHAPE[0] * SHAPE[1])
    yield HostMemory(pool.data.reshape(SHAPE), pool.file)
    pool.close()


@pytest.fixture
def private() -> HostMemory:
    """Memory that nobody can map."""
    return HostMemory(np.zeros(SHAPE, dtype=np.uint8))


Names = Callable[[TransportName, HostMemory], list[str]]


def test_all_that_work_are_there_by_themselves(names: Names, shared: HostMemory) -> None:
    assert names("auto", shared) == ["shm", "grpc"]


def test_what_does_not_work_is_left_out_and_why_is_told(
    names: Names, private: HostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, transports_module.__name__):
        assert names("auto", private) == ["grpc"]
    assert "transport shm is not used: transport shm needs the KV blocks" in caplog.text


@pytest.mark.parametrize("wanted", ["shm", "grpc"])
def test_a_forced_one_is_the_only_one(
    names: Names, shared: HostMemory, wanted: TransportName
) -> None:
    assert names(wanted, shared) == [wanted]


def test_a_forced_one_that_does_not_work_is_an_error(names: Names, private: HostMemory) -> None:
    with pytest.raises(ConfigError, match="memory that others can map"):
        names("shm", private)


def test_every_one_can_be_ranked(shared: HostMemory) -> None:
    with ThreadPoolExecutor(1) as executor:
        makers = transports_module._makers("decode-0:1", "127.0.0.1", executor, 1 << 20)
        assert set(makers) == set(TRANSPORTS)
        assert {name: make().name for name, make in makers.items()} == {n: n for n in makers}
