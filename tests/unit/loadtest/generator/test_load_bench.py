"""`baton bench serve`, `goodput` and `soak`, as commands, against a server that a test plays."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.errors import ConfigError
from deploy.cli.main import app
from deploy.cli.measure import bench_load_commands
from deploy.cli.options.exit_codes import ExitCode
from loadtest.generator import soak
from loadtest.generator.load_bench import SearchSettings, search_rate
from loadtest.generator.load_run import LoadRun
from loadtest.generator.load_settings import (
    LoadSettings,
    PaceSettings,
    ServerSettings,
    TrafficSettings,
    counted,
    make_traffic,
    open_trace,
)
from loadtest.generator.results.summary import Window
from loadtest.generator.workload.traffic import planned
from planning.common.slo import Slo
from tests.support.loadtest.fake_server import Asked, FakeServer, fake_server, good_answer
from tests.support.loadtest.load_report import make_run

MODELS = json.dumps({"data": [{"id": "served"}]})
METRICS = "# TYPE baton_active_requests gauge\nbaton_active_requests 0\nbaton_sequences{{}} {}\n"


class Server(threading.Thread):
    """Serves in a thread until it is stopped."""

    def __init__(self, sequences: int = 0) -> None:
        super().__init__()
        self.fake: FakeServer
        self._sequences = sequences
        self._up = threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with fake_server(self._answer) as self.fake:
            self._up.set()
            await self._end.wait()
            await asyncio.sleep(0)

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.line.startswith("POST"):
            await good_answer(asked, writer)
            return
        page = MODELS if "/v1/models" in asked.line else METRICS.format(self._sequences)
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n{page}".encode())

    def begin(self) -> None:
        self.start()
        assert self._up.wait(20)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self.join(20)
        assert not self.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server()
    serving.begin()
    yield serving
    serving.end()


def bench(server: Server, *words: str, code: int = 0) -> str:
    arguments = ["bench", *words, "--url", server.fake.url]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def posts(server: Server) -> list[dict[str, Any]]:
    return [asked.fields for asked in server.fake.asked if asked.line.startswith("POST")]


@pytest.mark.long
def test_serve(server: Server, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "html", "records")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    output = bench(
        server,
        *("serve", "--rate", "40,80", "--seconds", "0.5", "--arrivals", "constant"),
        *("--input", "20", "--output", "3", "--warm-up", "0.1", "--cool-down", "0.1", *options),
    )
    asked = posts(server)
    assert len(asked) == 60
    assert {fields["model"] for fields in asked} == {"served"}
    assert {len(fields["prompt"]) for fields in asked} == {20}
    assert len({tuple(fields["prompt"]) for fields in asked}) == 60
    found = json.loads(files["json"].read_text())
    assert found["settings"]["traffic"]["inputs"]["first"] == 20
    assert "api_key" not in files["json"].read_text()
    counts = [run["summary"]["all"]["requests"] for run in found["runs"]]
    assert counts == [12, 24]
    assert [run["summary"]["all"]["ok"] for run in found["runs"]] == counts
    assert len(files["records"].read_text().splitlines()) == 60
    assert "Goodput against rate" in files["html"].read_text()
    assert "80 requests/s" in output


def test_serve_a_closed_loop_of_chats(server: Server) -> None:
    words = ("--concurrency", "2", "--requests", "9", "--endpoint", "chat", "--input", "5")
    output = bench(server, "serve", *words, "--output", "2", "--warm-up", "0", "--cool-down", "0")
    assert len(posts(server)) == 9
    assert {len(fields["messages"][0]["content"].split()) for fields in posts(server)} == {5}
    assert "2 at a time" in output


def test_serve_a_trace(server: Server, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100 * n, "input_length": 32 + n, "output_length": 2, "hash_ids": [7, n]}
        for n in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ("--trace", str(trace), "--scale-time", "10", "--scale-length", "2")
    bench(server, "serve", *words, "--max-tokens", "19", "--warm-up", "0", "--cool-down", "0")
    asked = sorted(posts(server), key=lambda fields: len(fields["prompt"]))
    assert [len(fields["prompt"]) for fields in asked] == [16, 17, 17, 18]
    assert {fields["max_tokens"] for fields in asked} == {1}


def test_goodput(server: Server, tmp_path: Path) -> None:
    output = bench(
        server,
        *("goodput", "--slo", "ttft=10,tpot=10", "--first-rate", "20", "--max-rate", "30"),
        *("--seconds", "0.4", "--arrivals", "constant", "--input", "4", "--output", "2"),
        *("--json", str(tmp_path / "json")),
    )
    found = json.loads((tmp_path / "json").read_text())
    assert found["goodput_rate"] == 30
    assert [run["rate"] for run in found["runs"]] == [20, 30]
    assert "30 requests/s is the highest rate" in output


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("serve",), 2, "give --rate"),
        (("serve", "--rate", "1", "--concurrency", "2"), 2, "not both"),
        (("serve", "--rate", "0"), 2, "--rate"),
        (("serve", "--rate", "x"), 2, "--rate"),
        (("serve", "--rate", "1", "--arrivals", "never"), 2, "--arrivals"),
        (("serve", "--rate", "1", "--arrivals", "trace"), 1, "need a trace"),
        (("serve", "--rate", "1", "--endpoint", "other"), 2, "--endpoint"),
        (("serve", "--rate", "1", "--input", "few"), 1, "distribution"),
        (("serve", "--rate", "1", "--slo", "fast"), 1, "SLO"),
        (("serve", "--rate", "1", "--seconds", "2", "--warm-up", "3"), 1, "leave nothing"),
        (("serve", "--rate", "1", "--trace", "none"), 1, "cannot read"),
        (("serve", "--rate", "1", "--json", "none/else"), 1, "none/else"),
        (("goodput", "--first-rate", "0"), 2, "above 0"),
        (("soak", "--peak", "0"), 2, "above 0"),
    ],
)
def test_what_is_wrong_is_said(
    server: Server, words: tuple[str, ...], code: int, says: str
) -> None:
    assert says in bench(server, *words, code=code)
    assert not posts(server)


def test_a_url_may_end_as_for_other_clients(server: Server) -> None:
    words = ["bench", "serve", "--concurrency", "1", "--requests", "1", "--warm-up", "0"]
    url = f"{server.fake.url}/v1/"
    result = CliRunner().invoke(app, [*words, "--cool-down", "0", "--url", url])
    assert result.exit_code == 0, result.output
    assert [a.line.split()[1] for a in server.fake.asked if "POST" in a.line] == ["/v1/completions"]


def test_no_server() -> None:
    words = ["bench", "serve", "--rate", "1", "--url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "lists no model" in result.output


def test_ctrl_c_keeps_what_was_measured(server: Server, tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(posts(server)) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    output = bench(
        server,
        *("serve", "--rate", "50,60", "--seconds", "3600", "--warm-up", "0", "--input", "4"),
        *("--output", "2", "--json", str(tmp_path / "json")),
    )
    interrupting.join(20)
    (run,) = json.loads((tmp_path / "json").read_text())["runs"]
    assert 5 <= run["summary"]["all"]["ok"] < 1000
    assert "stopping" in output


def test_soak(server: Server, tmp_path: Path) -> None:
    output = bench(
        server,
        *("soak", "--peak", "20", "--seconds", "0.6", "--every", "0.1", "--input", "4"),
        *("--output", "2", "--json", str(tmp_path / "json")),
    )
    assert "leak: " not in output
    found = json.loads((tmp_path / "json").read_text())
    assert found["leaks"] == []
    assert found["samples"]
    assert 5 <= len(posts(server)) <= 80


@pytest.mark.long
def test_soak_sees_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "QUIET_S", 0.1)
    serving = Server(sequences=2)
    serving.begin()
    try:
        words = ("soak", "--peak", "20", "--seconds", "0.3", "--input", "4", "--output", "2")
        assert "leak: 2 sequences are held" in bench(serving, *words, code=ExitCode.LEAK)
    finally:
        serving.end()


LEAKY = """
import pathlib, time
held, files = [], []
while len(held) < 8000:
    held.append(b"x" * (1 << 16))
    if len(held) % 10 == 0 and len(files) < 900:
        files.append(open("/dev/null"))
    pathlib.Path("leaked").touch()
    time.sleep(0.005)
time.sleep(3600)
"""
"""Takes 12 MiB and 20 descriptors a second, and gives nothing back."""


@pytest.mark.long
def test_soak_sees_a_process_that_leaks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "QUIET_S", 0.1)
    monkeypatch.setattr(soak, "MORE_BYTES", 1 << 20)
    monkeypatch.setattr(soak, "MORE_SHARE", 0.0)
    monkeypatch.setattr(soak, "_FEWEST_SAMPLES", 4)
    leaky = subprocess.Popen([sys.executable, "-c", LEAKY], cwd=tmp_path)
    try:
        state = SimpleNamespace(processes={"decode-0": leaky.pid}, redis_url="", cluster_id="x")
        monkeypatch.setattr(bench_load_commands, "cluster_of_client", lambda *_: state)
        while not (tmp_path / "leaked").exists():
            assert leaky.poll() is None
        words = ("--seconds", "3", "--every", "0.1", "--input", "4", "--output", "2")
        output = bench(server, "soak", "--peak", "20", *words, code=ExitCode.LEAK)
    finally:
        leaky.kill()
        leaky.wait(20)
    assert "leak: decode-0 went on growing" in output
    assert re.search(r"leak: decode-0 has \d+ descriptors, at first \d+", output)


def settings(**pace: Any) -> LoadSettings:
    return LoadSettings(
        ServerSettings(), TrafficSettings(), PaceSettings(**pace), Slo(ttft_s=1.0, tpot_s=0.15)
    )


def test_a_search_tries_rates_with_new_prompts() -> None:
    seen = []

    def drive(load: LoadSettings, number: int) -> LoadRun:
        rate = load.pace.rate
        assert rate is not None
        seen.append((rate, number))
        run = make_run(rate)
        whole = replace(run.summary.all, attainment=1.0 if rate <= 5 else 0.5)
        return replace(run, summary=replace(run.summary, all=whole))

    runs, best = search_rate(settings(), SearchSettings(1.0, precision=0.1), drive, lambda _: None)
    assert best == 5.0
    assert seen == [(1, 0), (2, 1), (4, 2), (8, 3), (6, 4), (5, 5), (5.5, 6)]
    assert len(runs) == 7


def test_what_counts() -> None:
    assert counted(PaceSettings(), 200.0) == Window(10.0, 195.0)
    assert counted(PaceSettings(), 20.0) == Window(2.0, 18.0)
    assert counted(PaceSettings(warm_up_s=1.0, cool_down_s=0.0), 20.0) == Window(1.0, 20.0)
    with pytest.raises(ConfigError, match="leave nothing"):
        counted(PaceSettings(warm_up_s=20.0), 20.0)


def test_two_rates_have_the_same_pattern(tmp_path: Path) -> None:
    slow, fast = (make_traffic(settings(rate=rate, seconds=50.0), None) for rate in (2.0, 4.0))
    count = min(len(slow.times_s), len(fast.times_s))
    assert count > 50
    halved = [time / 2 for time in slow.times_s[:count]]
    assert list(fast.times_s[:count]) == pytest.approx(halved)


def test_a_trace_at_its_own_pace_or_another(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:15:{10 + n}.0,{100 + n},{n + 1}" for n in range(5)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    own = replace(settings(), traffic=TrafficSettings(trace=path))
    trace = open_trace(own.traffic)
    traffic = make_traffic(own, trace)
    assert traffic.times_s == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert traffic.seconds == pytest.approx(5.0)
    faster = replace(own, pace=PaceSettings(rate=2.0, seconds=4.0))
    traffic = make_traffic(faster, trace)
    assert traffic.times_s == pytest.approx([0.5 * n for n in range(8)])
    requests = list(planned(traffic.source, traffic.times_s))
    assert [one.input_tokens for one in requests] == [100, 101, 102, 103, 104, 100, 101, 102]
    few = make_traffic(replace(own, pace=PaceSettings(requests=3)), trace)
    assert (few.times_s, few.seconds) == ((0.0, 1.0, 2.0), 3.0)
