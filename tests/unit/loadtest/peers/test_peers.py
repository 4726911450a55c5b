"""The whole comparison, with programs that only pretend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError, Unavailable
from loadtest.common.workload import WORKLOADS
from loadtest.peers.bench_client import BenchClient
from loadtest.peers.peer_table import Run
from loadtest.peers.peers import Comparison, choose_peers, compare, default_peers, run_comparison
from tests.support.loadtest.fake_programs import Fakes, make_fakes

pytestmark = pytest.mark.long

_DEADLINE_S = 30.0


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return make_fakes(tmp_path / "programs")


def _comparison(*peers: str, alternate: bool = False) -> Comparison:
    workloads = (WORKLOADS["a"], WORKLOADS["b"])
    return Comparison(peers, workloads, repetitions=2, alternate=alternate, seed=5)


def _compare(fakes: Fakes, comparison: Comparison) -> list[Run]:
    client = BenchClient(fakes.folder / "vllm", fakes.folder)
    runs: list[Run] = []
    compare(comparison, fakes.programs, client, lambda _: None, runs.append)
    return runs


def test_each_server_is_started_once(fakes: Fakes) -> None:
    runs = _compare(fakes, _comparison("baton", "vllm"))
    assert fakes.calls == [
        "start baton",
        "drive baton 5 1",
        "drive baton 6 8",
        "drive baton 1005 1",
        "drive baton 1006 8",
        "start vllm",
        "drive vllm 5 1",
        "drive vllm 6 8",
        "drive vllm 1005 1",
        "drive vllm 1006 8",
    ]
    assert [run.seed for run in runs] == [5, 6, 1005, 1006] * 2
    assert fakes.left() == []


def test_servers_take_turns(fakes: Fakes) -> None:
    runs = _compare(fakes, _comparison("baton", "llamacpp", alternate=True))
    starts = [call for call in fakes.calls if call.startswith("start")]
    assert starts == ["start baton", "start llama-server"] * 2
    assert [run.repetition for run in runs] == [0] * 4 + [1] * 4
    assert fakes.left() == []


def test_a_peer_that_is_not_there_is_left_out_with_a_note(fakes: Fakes) -> None:
    said: list[str] = []
    programs = replace(fakes.programs, llama_server=None, gguf_q8=None)
    names = ("baton", "vllm", "llamacpp", "baton")
    assert choose_peers(names, programs, said.append) == ("baton", "vllm")
    assert said == [
        "llama.cpp, bf16 is left out: llama.cpp was not found: name its server with --llama-server"
    ]
    assert "baton-int8" not in default_peers(programs)
    assert "baton-int8" in default_peers(fakes.programs)
    with pytest.raises(ConfigError, match="no server is left"):
        choose_peers(("llamacpp",), programs, said.append)
    with pytest.raises(ConfigError, match="unknown peer 'nobody'"):
        choose_peers(("nobody",), programs, said.append)


def test_the_table_the_machine_and_the_file(fakes: Fakes, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    console = Console(width=40)
    comparison = _comparison("baton", "vllm", "llamacpp")
    with console.capture() as captured:
        run_comparison(comparison, fakes.programs, lambda _: None, console, output)
    text = captured.get()
    assert "1.25× · 0.80× · 0.80×" in text
    assert "Medians of 2." in text
    assert "vLLM 1.2 of vllm, llama.cpp 1.2 of llama-server." in text
    assert len(json.loads(output.read_text())["runs"]) == 12


def test_what_was_measured_before_a_failure_is_kept(fakes: Fakes, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"

    def say(text: str) -> None:
        if text.startswith("vLLM") and "ready" in text:
            fakes.set_mode("client", "fails")

    console = Console(width=40)
    comparison = _comparison("baton", "vllm")
    with (
        console.capture() as captured,
        pytest.raises(Unavailable, match="connection refused by a fake"),
    ):
        run_comparison(comparison, fakes.programs, say, console, output)
    assert "Baton, bf16" in captured.get()
    rows = json.loads(output.read_text())["runs"]
    assert [row["peer"] for row in rows] == ["baton"] * 4
    assert fakes.left() == []


def test_a_file_that_cannot_be_written_is_known_before_anything_starts(fakes: Fakes) -> None:
    output = fakes.folder / "absent" / "runs.json"
    with pytest.raises(ConfigError, match="cannot be written"):
        run_comparison(
            _comparison("baton"), fakes.programs, lambda _: None, Console(quiet=True), output
        )
    assert fakes.calls == []


def test_without_a_client_nothing_starts(fakes: Fakes) -> None:
    programs = replace(fakes.programs, vllm=None)
    with pytest.raises(ConfigError, match="--vllm-bin"):
        run_comparison(_comparison("baton"), programs, lambda _: None, Console(quiet=True), None)
    assert fakes.calls == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_server_and_client(fakes: Fakes, number: signal.Signals) -> None:
    fakes.set_mode("client", "hangs")
    code = (
        "from pathlib import Path\n"
        "from loadtest.peers.bench_client import BenchClient\n"
        "from loadtest.peers.peers import Comparison, compare\n"
        "from loadtest.common.workload import WORKLOADS\n"
        "from tests.support.loadtest.fake_programs import make_fakes\n"
        f"fakes = make_fakes(Path({str(fakes.folder)!r}))\n"
        "client = BenchClient(fakes.folder / 'vllm', fakes.folder)\n"
        "comparison = Comparison(('vllm',), (WORKLOADS['a'],), 1)\n"
        "compare(comparison, fakes.programs, client, print, print)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while not (fakes.folder / "hanging").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(_DEADLINE_S) != 0
    finally:
        process.kill()
        process.wait(_DEADLINE_S)
    assert fakes.left() == []
