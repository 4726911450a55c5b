"""The connections between ranks: who is let in, and how the loss of a rank is told."""

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


def joined(lead: LeaderChannel) -> list[FollowerChannel]:
    """All other ranks, connected."""
    found: list[FollowerChannel] = []

    def join() -> None:
        found.extend(
            FollowerChannel(lead.address, rank, WAIT_S, f"process {rank}")
            for rank in range(1, lead.ranks)
        )

    thread = threading.Thread(target=join)
    thread.start()
    lead.accept(WAIT_S)
    thread.join(WAIT_S)
    return found


def test_frames_reach_all_ranks_and_a_close_ends_them() -> None:
    lead = LeaderChannel(HOST, 3)
    ranks = joined(lead)
    lead.watch()
    for rank in ranks:
        rank.live(lambda _: None)
        rank.ready(f"host:{id(rank)}")
    assert lead.addresses(WAIT_S) == tuple(f"host:{id(rank)}" for rank in ranks)
    assert [lead.greetings[rank].process for rank in (1, 2)] == ["process 1", "process 2"]
    lead.tell(b"one")
    lead.tell(b"two" * 1000)
    assert [rank.frame() for rank in ranks] == [b"one"] * 2
    assert [rank.frame() for rank in ranks] == [b"two" * 1000] * 2
    for rank in ranks:
        rank.close()
    assert "has ended" in lead.lost.result(WAIT_S)
    with pytest.raises(WorkerFailed, match="has ended"):
        lead.tell(b"three")
    lead.close()


def test_a_rank_learns_of_the_end_of_rank_0() -> None:
    lead = LeaderChannel(HOST, 2)
    (rank,) = joined(lead)
    broken: SimpleQueue[str] = SimpleQueue()
    rank.live(broken.put)
    lead.close()
    assert "rank 0 has gone" in broken.get(timeout=WAIT_S)
    assert rank.frame() is None
    rank.close()


def test_a_rank_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "SILENT_RANK_S", 1.0)
    monkeypatch.setattr(step_channel, "BEAT_S", 0.1)
    lead = LeaderChannel(HOST, 3)
    silent, alive = joined(lead)
    alive.live(lambda _: None)
    silent.ready("none")
    lead.watch()
    assert "rank 1 has said nothing" in lead.lost.result(WAIT_S)
    for end in (lead, silent, alive):
        end.close()


def test_a_rank_that_loads_may_say_nothing_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_channel, "SILENT_RANK_S", 0.2)
    monkeypatch.setattr(step_channel, "SILENT_LOADING_S", 2.0)
    monkeypatch.setattr(step_channel, "BEAT_S", 0.05)
    lead = LeaderChannel(HOST, 2)
    (silent,) = joined(lead)
    lead.watch()
    reason = lead.lost.result(WAIT_S)
    assert float(reason.rpartition("nothing for ")[2].removesuffix(" s")) >= 2
    for end in (lead, silent):
        end.close()


def test_strangers_are_not_let_in() -> None:
    lead = LeaderChannel(HOST, 2)
    wrong = FollowerChannel(replace(lead.address, token="0" * 32), 1, WAIT_S)
    out_of_range = FollowerChannel(lead.address, 5, WAIT_S)
    with socket.create_connection((HOST, lead.address.port)) as nobody:
        nobody.shutdown(socket.SHUT_WR)
        with pytest.raises(WorkerFailed, match=r"ranks \[1\] of 2 did not come"):
            lead.accept(1.0)
    for stranger in (wrong, out_of_range):
        assert stranger.frame() is None
        stranger.close()
    lead.close()


def test_nobody_waits_for_ranks_once_one_is_known_to_have_failed() -> None:
    lead = LeaderChannel(HOST, 2)
    threading.Timer(0.2, lead.fail, ("rank 1: no such file",)).start()
    with pytest.raises(WorkerFailed, match="rank 1: no such file"):
        lead.accept(WAIT_S)
    with pytest.raises(WorkerFailed, match="rank 1: no such file"):
        lead.addresses(WAIT_S)
    lead.close()


def test_a_rank_that_finds_nobody_says_so() -> None:
    lead = LeaderChannel(HOST, 2)
    lead.close()
    with pytest.raises(WorkerFailed, match="rank 1 cannot reach rank 0"):
        FollowerChannel(lead.address, 1, 1.0)
