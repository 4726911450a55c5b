"""Which transports a worker has."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext

import numpy as np
import pytest
import torch

from baton.config.choices import TransportName
from baton.config.cluster import Config
from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.pairs.negotiation import TRANSPORTS
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.transport import Peer, Transport
from tests.support.kvtransfer.fake_cuda import Allocation, FakeCuda
from worker.exchange import transports as transports_module
from worker.exchange.transports import make_transports

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
    """Memory that no other process can map."""
    return HostMemory(np.zeros(SHAPE, dtype=np.uint8))


Names = Callable[[TransportName, HostMemory], list[str]]


def test_all_that_work_are_there_by_themselves(names: Names, shared: HostMemory) -> None:
    assert names("auto", shared) == ["shm", "grpc"]


def test_what_does_not_work_is_left_out_with_the_reason(
    names: Names, private: HostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, transports_module.__name__):
        assert names("auto", private) == ["grpc"]
    [record] = caplog.records
    assert record.getMessage() == (
        "transport auto uses grpc instead of shm: transport shm needs the KV blocks in memory "
        "that others can map"
    )


class GpuBlocks(HostMemory):
    """Blocks that say they are on a GPU."""

    @property
    def device(self) -> str:
        return "cuda:0"


def test_a_gpu_worker_that_cannot_share_its_blocks_logs_a_warning(
    names: Names, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda([0], {})
    cuda.errors["cuMemGetAddressRange_v2"] = 1
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: cuda)
    memory = GpuBlocks(np.zeros(SHAPE, dtype=np.uint8))
    cuda.own.append(Allocation(memory.address, memory.data.nbytes, 0))
    with caplog.at_level(logging.WARNING, transports_module.__name__):
        assert names("auto", memory) == ["grpc"]
    [record] = caplog.records
    assert "uses grpc instead of cuda_ipc" in record.getMessage()
    assert "PYTORCH_ALLOC_CONF" in record.getMessage()


@pytest.mark.parametrize(
    ("wanted", "gpu", "opens"),
    [("auto", 0, True), ("auto", 1, False), ("cuda_ipc", 0, True), ("cuda_ipc", 1, True)],
)
def test_blocks_on_another_gpu_are_opened_where_cuda_ipc_is_forced(
    wanted: TransportName, gpu: int, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer's that lie on ``gpu``, by a receiver on GPU 0."""
    machine: dict[bytes, Allocation] = {}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    with ThreadPoolExecutor(1) as executor, ExitStack() as stack:

        def make(wanted: TransportName, gpu: int) -> tuple[FakeCuda, Transport]:
            cuda = FakeCuda([gpu], machine)
            memory = GpuBlocks(np.zeros(SHAPE, dtype=np.uint8))
            cuda.own.append(Allocation(memory.address, memory.data.nbytes, gpu))
            monkeypatch.setattr(cuda_ipc, "_driver", lambda: cuda)
            made = make_transports(
                Config(transport=wanted), memory, "decode-0:1", "127.0.0.1", executor
            )
            for transport in made:
                stack.callback(transport.close)
            return cuda, made[0]

        _, writer = make("auto", gpu)
        cuda, receiver = make(wanted, 0)
        pid = json.loads(writer.offer())["pid"]
        offer = writer.offer().replace(f'"pid": {pid}'.encode(), b'"pid": 1')
        with nullcontext() if opens else pytest.raises(HandoffError, match="forces it"):
            receiver.accept(Peer("prefill-0:1", ""), offer)
        assert cuda.opened == ([0] if opens else [])


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
        # What leaves the machine without TLS.
        encrypting = {name for name, make in makers.items() if make().encrypts}
        assert encrypting == {"gloo", "nccl", "nixl"}


def test_a_data_network_binds_transports_and_libraries(
    private: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1")
    config = Config(transport="gloo", data_network="127.0.0.0/8")
    with ThreadPoolExecutor(1) as executor:
        (made,) = make_transports(config, private, "decode-0:1", "192.0.2.1", executor)
        with closing(made):
            assert json.loads(made.offer())["host"] == "127.0.0.1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
        assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1", "the operator's"
        away = Config(transport="gloo", data_network="198.51.100.0/24")
        with pytest.raises(ConfigError, match=r"no address of this machine is in 198\.51"):
            make_transports(away, private, "decode-0:1", "127.0.0.1", executor)
