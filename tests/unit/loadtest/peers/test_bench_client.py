"""The client's runs, and what is said when one fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import ConfigError, Unavailable
from loadtest.common.peer_servers import Server, make_server, serving
from loadtest.common.workload import WORKLOADS
from loadtest.peers.bench_client import BenchClient
from tests.support.loadtest.fake_programs import SPEEDS, Fakes, make_fakes


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return make_fakes(tmp_path)


@pytest.fixture
def server(fakes: Fakes) -> Iterator[Server]:
    made = make_server("vllm", fakes.programs)
    with serving(made, fakes.folder / "log"):
        yield made


def _client(fakes: Fakes) -> BenchClient:
    return BenchClient(fakes.folder / "vllm", fakes.folder)


def test_a_run_gives_what_the_client_wrote(fakes: Fakes, server: Server) -> None:
    result = _client(fakes).run(server, WORKLOADS["b"], 17)
    assert (result.completed, result.num_prompts) == (48, 48)
    assert result.output_throughput == SPEEDS["vllm"]
    assert result.p99_tpot_ms == 20.0
    assert fakes.calls[-1] == "drive vllm 17 8"


def test_a_failed_client_shows_its_last_lines(fakes: Fakes, server: Server) -> None:
    fakes.set_mode("client", "fails")
    with pytest.raises(Unavailable) as caught:
        _client(fakes).run(server, WORKLOADS["a"], 1)
    message = caught.value.message
    assert "vLLM, all cores, workload a, ended with exit code 3" in message
    assert message.endswith("first line\nconnection refused by a fake")


def test_a_run_without_a_completed_request_is_a_failure(fakes: Fakes, server: Server) -> None:
    fakes.set_mode("client", "none")
    with pytest.raises(Unavailable, match="completed no request"):
        _client(fakes).run(server, WORKLOADS["a"], 1)


def test_a_client_that_hangs_is_ended(fakes: Fakes, server: Server) -> None:
    fakes.set_mode("client", "hangs")
    with pytest.raises(Unavailable, match="did not finish within 0 s"):
        _client(fakes).run(server, WORKLOADS["a"], 1, deadline_s=0.2)


def test_a_client_that_leaves_nothing_is_a_failure(fakes: Fakes, server: Server) -> None:
    silent = fakes.folder / "silent"
    silent.write_text("#!/bin/sh\necho nothing to report\n")
    silent.chmod(0o755)
    with pytest.raises(Unavailable, match=r"no readable result.*\nnothing to report"):
        BenchClient(silent, fakes.folder).run(server, WORKLOADS["a"], 1)


def test_a_client_that_is_no_program(fakes: Fakes, server: Server) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        BenchClient(fakes.folder / "absent", fakes.folder).run(server, WORKLOADS["a"], 1)
