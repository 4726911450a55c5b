"""`baton bench transfer` with two processes, small sizes and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.errors import ConfigError, DeadlineExceeded, TicketEnded, WorkerFailed
from deploy.cli.main import app
from loadtest.common.json_worker import helper
from loadtest.handoff.transfer_bench import TransferSettings, measure_transfers
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.long

BLOCK = 64 << 10


@pytest.mark.long
def test_each_transport_and_size_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    model = make_tiny_model(tmp_path / "model", head_dim=16, context=2048)
    options = ["--transport", "shm,grpc", "--block-bytes", str(BLOCK), "--most", "4"]
    options += ["--model", str(model), "--repetitions", "1"]
    arguments = ["bench", "transfer", *options, "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    sizes = [BLOCK, 1 << 20, 4 << 20]
    assert [(row["transport"], row["bytes"]) for row in found["rows"]] == [
        (name, size) for name in ("shm", "grpc") for size in sizes
    ]
    assert [row["limit"] for row in found["rows"]] == ["memcpy"] * 3 + ["grpcio"] * 3
    assert all(row["gb_per_s"] > 0 and row["ratio"] > 0 for row in found["rows"])
    assert found["empty_handoff_ms_p50"] > 0
    assert found["empty_handoff_busy_ms_p50"] > 0
    assert found["empty_handoff"]["model"] == "model"
    assert "Empty handoff (model)" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["--transport", "cuda_ipc"], "unknown transport 'cuda_ipc'"),
        (["--block-bytes", "100", "--transport", "shm"], "a multiple of 64 is needed"),
        (["--block-bytes", str(8 << 20)], "the maximum is 1048576"),
        (["--json", "/nonexistent/figures.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured(options: list[str], message: str) -> None:
    arguments = ["bench", "transfer", "--model", "none", "--most", "1", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output


async def test_a_size_that_the_memory_does_not_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadtest.handoff.transfer_bench.available_bytes", lambda: 5 << 20)
    said: list[str] = []
    settings = TransferSettings(("shm",), BLOCK, 1 << 30, repetitions=1)
    rows = await measure_transfers(settings, said.append)
    assert rows[-1].bytes == 1 << 20
    assert said[0] == "sizes end at 1 MiB: there is not enough memory for three larger pools"


async def test_a_helper_that_fails_says_why(tmp_path: Path) -> None:
    start = {"transport": "shm", "blocks": 4, "block_bytes": 100}
    starting = helper("loadtest.handoff.transfer_receiver", start, tmp_path / "log", ready_s=60.0)
    with pytest.raises(ConfigError, match="a multiple of 64"):
        await starting.__aenter__()


async def test_a_helper_answers_errors_and_ends_with_its_asker(tmp_path: Path) -> None:
    start = {"transport": "shm", "blocks": 4, "block_bytes": BLOCK}
    log = tmp_path / "log"
    async with helper("loadtest.handoff.transfer_receiver", start, log, ready_s=60.0) as receiver:
        with pytest.raises(TicketEnded, match="no such ticket is unknown"):
            await receiver.ask({"commit": "no such ticket", "writer": "w"}, 30.0)
        promised = await receiver.ask({"promise": 2, "writer": "w"}, 30.0)
        assert promised["ticket"]
        with pytest.raises(DeadlineExceeded):
            await receiver.hear(0.01)
    with pytest.raises(WorkerFailed, match="has ended"):
        await receiver.hear(30.0)


async def test_a_helper_that_dies_is_noticed(tmp_path: Path) -> None:
    starting = helper("loadtest.no_such_module", {}, tmp_path / "log", ready_s=60.0)
    with pytest.raises(WorkerFailed, match="no_such_module"):
        await starting.__aenter__()


def test_without_a_transport_that_works_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_transport: object, _memory: object) -> None:
        raise ConfigError("not on this machine")

    # The helper process has its own: the sender's end is the one that refuses.
    monkeypatch.setattr("kvtransfer.transports.shm_transport.ShmTransport.register", refuse)
    arguments = ["bench", "transfer", "--model", "none", "--most", "1", "--transport", "shm"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "shm is left out: not on this machine" in result.output
    assert "no transport is left to measure" in result.output
