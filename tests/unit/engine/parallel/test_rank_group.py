"""The process group of a worker's ranks: real ones of gloo, and what NCCL is asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import WorkerFailed
from engine.parallel.rank_group import RankGroup, Rendezvous, _in_order

HOST = "127.0.0.1"
CPU = torch.device("cpu")
RANKS = 3
WAIT_S = 60.0


def one_rank(rank: int, rendezvous: Rendezvous) -> dict[str, Any]:
    """What a rank finds of each operation."""
    if rank:
        group = RankGroup.join(HOST, rendezvous.port, rank, RANKS, CPU, HOST)
    else:
        group = RankGroup(rendezvous.store, 0, RANKS, CPU, HOST)
    found: dict[str, Any] = {"sum": group.add(torch.full((5,), float(rank + 1))).tolist()}
    shared = torch.full((2,), rank + 7)
    group.broadcast(shared)
    gathered = group.gather(torch.tensor([rank, -rank]))
    found["shared"] = shared.tolist()
    found["gathered"] = None if gathered is None else gathered.tolist()
    found["everywhere"] = group.gather_everywhere(torch.tensor([rank])).tolist()
    found["least"] = group.least(10 - rank)
    return found


def test_operations_between_ranks() -> None:
    rendezvous = Rendezvous(HOST, RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        started = [threads.submit(one_rank, rank, rendezvous) for rank in range(RANKS)]
        found = [each.result(WAIT_S) for each in started]
    for rank, each in enumerate(found):
        assert each == {
            "sum": [6.0] * 5,
            "shared": [7, 7],
            "gathered": None if rank else [[0, 0], [1, -1], [2, -2]],
            "everywhere": [[0], [1], [2]],
            "least": 8,
        }


class InOrder:
    """Stands for NCCL's group: works on the caller's stream, and gives nothing to wait for."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asked.append(options.asyncOp)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asked.append(options.asyncOp)


@pytest.mark.skipif(
    not hasattr(torch.distributed.AllreduceOptions(), "asyncOp"), reason="torch 2.8 and later"
)
def test_a_steps_operations_take_no_stream_of_their_own() -> None:
    group = RankGroup.__new__(RankGroup)
    group.rank, group.ranks, group._device = 0, 2, CPU
    group._group = InOrder()
    group.add(torch.zeros(2))
    group.broadcast(torch.zeros(2))
    assert group._group.asked == [False, False]


def test_options_of_a_torch_that_cannot_say_it() -> None:
    options = SimpleNamespace(rootRank=0)
    assert _in_order(options) == SimpleNamespace(rootRank=0)


def test_an_operation_that_fails_is_reported_as_a_lost_rank() -> None:
    class Broken:
        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    group = RankGroup.__new__(RankGroup)
    group.rank, group.ranks = 0, 2
    group._group = Broken()
    with pytest.raises(WorkerFailed, match=r"rank 0 of 2.*Connection closed"):
        group.add(torch.zeros(2))
