"""Workers of several ranks as Ray places them, and what clients see when a rank goes."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from baton.rpc.grpc_channel import open_blocking_channel
from baton.security.tls import PeerRole, TlsFiles
from baton.v1 import rank_pb2, rank_pb2_grpc
from deploy.workers.node import NodeWorkers
from tests.support.certificates import Authority
from tests.support.e2e.answers import answer_of, end_amid_an_answer, streamed
from tests.support.e2e.cluster import START_S, UpProcess
from tests.support.models import make_tiny_model

# Clusters of up to six processes that import torch, on machines that may have two cores.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = 120
REPLACED_S = 2 * START_S
STREAMS = 6
CALLING: tuple[PeerRole, ...] = ("client", "router", "monitor", "worker")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)


def up_with(model: Path, *arguments: str) -> UpProcess:
    plain = ("--model", str(model), "--dtype", "float32", "--local-prefill", "never")
    return UpProcess(*plain, *arguments)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[UpProcess]:
    """Two decode workers of two ranks each. However it was treated, it ends as it should."""
    ranks = ("--prefill-tp", "2", "--decode", "2", "--decode-tp", "2")
    with up_with(model, *ranks) as up:
        yield up.wait_ready(2 * START_S)
        end_amid_an_answer(up)


def rank_pids(up: UpProcess) -> dict[str, int]:
    """The process ids of workers and their other ranks, by their names."""
    living = NodeWorkers(Path(up.state.run_directory) / "workers").running()
    return {worker.slot: worker.process.pid for worker in living}


def wait_for_all(
    up: UpProcess, others: dict[str, int], deadline_s: float = REPLACED_S, slot: str = "decode-0"
) -> None:
    """Until every rank of ``slot`` is there and serves, none of those in ``others``."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = rank_pids(up)
        if found.keys() >= others.keys() and not found.items() & others.items():
            break
        time.sleep(0.2)
    else:
        raise AssertionError(f"{others} were not replaced: {rank_pids(up)}")
    up.wait_for(f"{slot} is back", deadline_s)
    up.wait_healthy(deadline_s)


def group_of(pids: dict[str, int], slot: str) -> dict[str, int]:
    """Those of one worker's ranks."""
    return {name: pid for name, pid in pids.items() if name.partition(".")[0] == slot}


def times_loading(up: UpProcess) -> int:
    """How often rank 1 of decode-0 has begun to load its share."""
    return (up.logs / "decode-0.rank-1.log").read_text().count("rank 1 of 2 loads")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_degrees_change_no_answer(
    cluster: UpProcess, model: Path, prefill_tp: int, decode_tp: int
) -> None:
    expected = answer_of(cluster, TOKENS)
    degrees = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
    with up_with(model, *degrees) as up:
        up.wait_ready(2 * START_S)
        assert answer_of(up, TOKENS) == expected
        up.terminate()
        assert up.wait() == 0, up.text


LONG_PROMPT = " ".join(f"{number} is not {number * 7 % 31}." for number in range(28))
"""Of bytes, a token each: some hundreds, and not all alike."""


def test_ranks_that_divide_prompts_change_no_answer(cluster: UpProcess, model: Path) -> None:
    expected = answer_of(cluster, 20, LONG_PROMPT)
    with up_with(model, "--prefill-cp", "2") as up:
        up.wait_ready(2 * START_S)
        assert answer_of(up, 20, LONG_PROMPT) == expected
        assert answer_of(up, 20, f"No: {LONG_PROMPT}") == answer_of(
            cluster, 20, f"No: {LONG_PROMPT}"
        )
        before = rank_pids(up)
        assert before.keys() == {"prefill-0", "prefill-0.rank-1", "decode-0"}
        up.forget_output()
        psutil.Process(before["prefill-0.rank-1"]).send_signal(signal.SIGKILL)
        gone = {slot: pid for slot, pid in before.items() if slot.startswith("prefill-0")}
        wait_for_all(up, gone, slot="prefill-0")
        assert answer_of(up, 20, f"Yes: {LONG_PROMPT}") == answer_of(
            cluster, 20, f"Yes: {LONG_PROMPT}"
        )
        up.terminate()
        assert up.wait() == 0, up.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("slot", ["decode-0.rank-1", "decode-0"])
def test_a_rank_that_goes_costs_no_client_anything(
    cluster: UpProcess, slot: str, number: signal.Signals
) -> None:
    cluster.wait_healthy()
    cluster.forget_output()
    expected = answer_of(cluster, TOKENS)
    before = rank_pids(cluster)
    begun = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(streamed, cluster, TOKENS, one) for one in begun]
        for one in begun:
            assert one.wait(START_S)
        psutil.Process(before[slot]).send_signal(number)
        for answer in running:
            assert answer.result(START_S) == expected
    # The whole group was replaced, the stopped process ended.
    gone = group_of(before, "decode-0")
    wait_for_all(cluster, gone)
    assert not any(psutil.pid_exists(pid) for pid in gone.values())
    assert answer_of(cluster, TOKENS) == expected


def test_ranks_and_their_links_have_certificates(
    cluster: UpProcess, model: Path, tmp_path: Path
) -> None:
    """KV goes by gRPC between the ranks of both workers, which admit only workers."""
    cluster.wait_healthy()
    expected = answer_of(cluster, TOKENS)
    certs = Authority(tmp_path).folder
    ranks = ("--prefill-tp", "2", "--decode-tp", "2", "--transport", "grpc")
    with up_with(model, *ranks, "--certs", str(certs)) as up:
        up.wait_ready(2 * START_S)
        assert answer_of(up, TOKENS, tls=TlsFiles.in_folder(certs, "client")) == expected
        for slot in ("prefill-0.rank-1", "decode-0.rank-1"):
            said = (up.logs / f"{slot}.log").read_text()
            serves = re.search(r"is ready and serves on (\S+)", said)
            assert serves, said
            assert _join(serves[1], None) is grpc.StatusCode.UNAVAILABLE
            for role in CALLING:
                code = _join(serves[1], TlsFiles.in_folder(certs, role))
                assert (code is grpc.StatusCode.PERMISSION_DENIED) == (role != "worker"), role
        up.terminate()
        assert up.wait() == 0, up.text


def _join(address: str, files: TlsFiles | None) -> grpc.StatusCode:
    """How a rank ends the stream of a caller that begins no session in it."""
    with open_blocking_channel(address, files, None if files is None else "worker") as channel:
        call = rank_pb2_grpc.RankServiceStub(channel).Join(
            iter([rank_pb2.JoinRequest()]), timeout=START_S
        )
        code: grpc.StatusCode = call.code()
        return code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_goes_while_it_loads_has_its_worker_begin_again(
    cluster: UpProcess, number: signal.Signals
) -> None:
    cluster.wait_healthy()
    cluster.forget_output()
    expected = answer_of(cluster, TOKENS)
    loaded, first = times_loading(cluster), rank_pids(cluster)["decode-0"]
    psutil.Process(first).kill()
    end = time.monotonic() + REPLACED_S
    while times_loading(cluster) == loaded:
        assert time.monotonic() < end, cluster.text
        time.sleep(0.01)
    second = group_of(rank_pids(cluster), "decode-0")
    psutil.Process(second["decode-0.rank-1"]).send_signal(number)
    # The other worker serves meanwhile.
    assert answer_of(cluster, TOKENS) == expected
    wait_for_all(cluster, second)
    assert not any(psutil.pid_exists(pid) for pid in second.values())
    assert answer_of(cluster, TOKENS) == expected
