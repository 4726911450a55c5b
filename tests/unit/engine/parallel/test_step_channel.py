"""The connections between ranks: which callers are admitted, and how a lost rank is reported."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest

from baton.errors import WorkerFailed
from engine.parallel import step_channel
from engine.parallel.step_channel import FollowerChannel, LeaderChannel

HOST = "127.0.0.1"
WAIT_S = 30.0


def joined(leader: LeaderChannel) -> list[FollowerChannel]:
    """All other ranks, connected."""
    found: list[FollowerChannel] = []

    def join() -> None:
        found.extend(
            FollowerChannel(leader.address, rank, WAIT_S, f"process {rank}")
            for rank in range(1, leader.ranks)
        )

    thread = threading.Thread(target=join)
    thread.start()
    leader.accept(WAIT_S)
    thread.join(WAIT_S)
    return found


def test_frames_reach_all_ranks_and_a_close_ends_them() -> None:
    leader = LeaderChannel(HOST, 3)
    ranks = joined(leader)
    leader.watch()
    for rank in ranks:
        rank.live(lambda _: None)
        rank.ready(f"host:{id(rank)}")
    assert leader.addresses(WAIT_S) == tuple(f"host:{id(rank)}" for rank in ranks)
    assert [leader.greetings[rank].process for rank in (1, 2)] == ["process 1", "process 2"]
    leader.tell(b"one")
    leader.tell(b"two" * 1000)
    assert [rank.frame() for rank in ranks] == [b"one"] * 2
    assert [rank.frame() for rank in ranks] == [b"two" * 1000] * 2
    for rank in ranks:
        rank.close()
    assert "has ended" in leader.lost.result(WAIT_S)
    with pytest.raises(WorkerFailed, match="has ended"):
        leader.tell(b"three")
    leader.close()


def test_a_rank_learns_of_the_end_of_rank_0() -> None:
    leader = LeaderChannel(HOST, 2)
    (rank,) = joined(leader)
    broken: SimpleQueue[str] = SimpleQueue()
    rank.live(broken.put)
    leader.close()
    assert "rank 0 is gone" in broken.get(timeout=WAIT_S)
    assert rank.frame() is None
    rank.close()


def test_a_rank_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "SILENT_RANK_S", 1.0)
    monkeypatch.setattr(step_channel, "BEAT_S", 0.1)
    leader = LeaderChannel(HOST, 3)
    silent, alive = joined(leader)
    alive.live(lambda _: None)
    silent.ready("none")
    leader.watch()
    assert "rank 1 was silent" in leader.lost.result(WAIT_S)
    for end in (leader, silent, alive):
        end.close()


def test_a_rank_that_loads_may_say_nothing_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "SILENT_RANK_S", 0.2)
    monkeypatch.setattr(step_channel, "SILENT_LOADING_S", 2.0)
    monkeypatch.setattr(step_channel, "BEAT_S", 0.05)
    leader = LeaderChannel(HOST, 2)
    (silent,) = joined(leader)
    leader.watch()
    reason = leader.lost.result(WAIT_S)
    assert float(reason.rpartition("silent for ")[2].removesuffix(" s")) >= 2
    for end in (leader, silent):
        end.close()


def test_strangers_are_not_let_in() -> None:
    leader = LeaderChannel(HOST, 2)
    wrong = FollowerChannel(replace(leader.address, token="0" * 32), 1, WAIT_S)
    out_of_range = FollowerChannel(leader.address, 5, WAIT_S)
    with socket.create_connection((HOST, leader.address.port)) as nobody:
        nobody.shutdown(socket.SHUT_WR)
        with pytest.raises(WorkerFailed, match=r"ranks \[1\] of 2 did not connect"):
            leader.accept(1.0)
    for stranger in (wrong, out_of_range):
        assert stranger.frame() is None
        stranger.close()
    leader.close()


def test_ranks_are_not_waited_for_once_one_has_failed() -> None:
    leader = LeaderChannel(HOST, 2)
    threading.Timer(0.2, leader.fail, ("rank 1: no such file",)).start()
    with pytest.raises(WorkerFailed, match="rank 1: no such file"):
        leader.accept(WAIT_S)
    with pytest.raises(WorkerFailed, match="rank 1: no such file"):
        leader.addresses(WAIT_S)
    leader.close()


def test_a_rank_without_peers_reports_it() -> None:
    leader = LeaderChannel(HOST, 2)
    leader.close()
    with pytest.raises(WorkerFailed, match="rank 1 cannot reach rank 0"):
        FollowerChannel(leader.address, 1, 1.0)
