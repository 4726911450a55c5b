"""`baton batch` against a real front on a scripted cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.client.http_api import open_api
from baton.errors import BatonError, InvalidRequest, NotFound, Unavailable
from baton.security.tls import TlsFiles, server_context
from deploy.cli.client.batch_command import BatchCommand, run_batch
from deploy.cli.main import app
from deploy.cli.options.exit_codes import ExitCode
from deploy.processes.ports import free_port
from router.batches.protocol import BatchObject
from router.batches.schedule.plan import BatchSchedule, SpeedState
from router.batches.storage.batch import Batch, BatchStatus
from tests.support.certificates import Authority
from tests.support.loadtest.fake_server import Asked, fake_server, refusal
from tests.support.router.batches_api import CHAT, chat, lines, served

DEADLINE_S = 30.0


@dataclass
class Terminal:
    """Runs the command on a thread."""

    url: str
    said: list[str] = field(default_factory=list)
    drawn: StringIO = field(default_factory=StringIO)

    async def run(self, file: Path | None, batch_id: str = "", output: Path | None = None) -> int:
        def work() -> int:
            with open_api(self.url) as client:
                command = BatchCommand(
                    client,
                    self.said.append,
                    Console(file=self.drawn, force_terminal=True),
                    poll_s=0.02,
                    away_s=0.1,
                )
                return run_batch(command, file, batch_id, "24h", output)

        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.to_thread(work)


@asynccontextmanager
async def terminal(folder: Path) -> AsyncIterator[Terminal]:
    async with served(folder / "data") as there:
        yield Terminal(f"http://{there.address}")


def written(folder: Path, bodies: list[dict[str, Any]]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(lines(bodies))
    return path


def names(path: Path) -> list[str]:
    return [json.loads(row)["custom_id"] for row in path.read_text().splitlines()]


async def test_all_lines_are_answered(tmp_path: Path) -> None:
    async with terminal(tmp_path) as there:
        assert await there.run(written(tmp_path, [chat(), chat()])) == 0
        assert names(tmp_path / "in.results.jsonl") == ["c-0", "c-1"]
        assert not (tmp_path / "in.results.errors.jsonl").exists()
        assert "completed: 2 of 2 lines were answered" in there.said


async def test_lines_without_an_answer_are_reported(tmp_path: Path) -> None:
    async with terminal(tmp_path) as there:
        file, output = written(tmp_path, [chat(), chat(top_p=7)]), tmp_path / "out.jsonl"
        assert await there.run(file, output=output) == ExitCode.INCOMPLETE
        assert names(output) == ["c-0"]
        assert names(tmp_path / "out.errors.jsonl") == ["c-1"]


async def test_a_batch_is_gone_on_with_by_its_id(tmp_path: Path) -> None:
    async with terminal(tmp_path) as there:
        await there.run(written(tmp_path, [chat()]))
        batch_id = there.said[0].split()[1].rstrip(":")
        output = tmp_path / "again.jsonl"
        assert await there.run(None, batch_id, output) == 0
        assert names(output) == ["c-0"]


async def test_what_is_planned_for_a_batch_is_shown() -> None:
    late = BatchSchedule(SpeedState.WAITING, 0.0, 1_795_478_400.0, 1_795_500_000.0, late_lines=20)
    made = Batch("batch_x", "acme", "", "tiny", CHAT, "file", "24h", 1000, 4600, {})
    going = replace(made, status=BatchStatus.IN_PROGRESS, total=30)
    ended = replace(made, status=BatchStatus.EXPIRED, total=30, failed=30)
    shown = [
        BatchObject.of(going),
        *[BatchObject.of(going, late)] * 3,
        BatchObject.of(ended),
    ]

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = shown.pop(0).model_dump_json().encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with fake_server(answer) as server:
        there = Terminal(server.url)
        assert await there.run(None, "batch_x") == ExitCode.INCOMPLETE
    assert sum("about 20 lines will have no answer" in line for line in there.said) == 1
    assert "waits for batch_hours until" in there.drawn.getvalue()


async def test_a_file_at_fault(tmp_path: Path) -> None:
    async with terminal(tmp_path) as there:
        with pytest.raises(InvalidRequest, match="the model 'other' does not exist"):
            await there.run(written(tmp_path, [chat(model="other")]))
        for text, words in (("{", "line 1"), ("\n", "no lines")):
            path = tmp_path / "bad.jsonl"
            path.write_text(text)
            with pytest.raises(InvalidRequest, match=words):
                await there.run(path)


async def test_a_batch_that_does_not_exist(tmp_path: Path) -> None:
    async with terminal(tmp_path) as there:
        with pytest.raises(NotFound, match=r"no such batch \(404 not_found\)"):
            await there.run(None, "batch_x")


async def test_a_server_that_is_not_a_router() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with fake_server(answer) as server:
        with pytest.raises(BatonError, match="did not answer like a Baton router"):
            await Terminal(server.url).run(None, "batch_x")


async def test_a_cluster_that_stays_away(tmp_path: Path) -> None:
    there = Terminal(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable):
        await there.run(None, "batch_x")


@pytest.mark.parametrize("arguments", [[], ["FILE", "--id", "batch_x"]])
def test_a_file_or_an_id_is_needed(tmp_path: Path, arguments: list[str]) -> None:
    file = written(tmp_path, [chat()])
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["batch", *given])
    assert result.exit_code == 2
    assert "give either a file or --id" in result.output


def test_exit_code_without_a_listener(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    file = written(tmp_path, [chat()])
    result = CliRunner().invoke(app, ["batch", str(file), "--http", address])
    assert result.exit_code == 1
    assert f"no router answers at http://{address}" in result.output


async def test_the_key_and_the_certificates_of_the_options_are_used(tmp_path: Path) -> None:
    folder = Authority(tmp_path).folder
    own = TlsFiles.in_folder(folder, "client")
    options = ["--ca", str(own.authority), "--certificate", str(own.certificate)]
    options += ["--certificate-key", str(own.key), "--api-key", "key"]

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert asked.headers["authorization"] == "Bearer key"
        writer.write(refusal(404, {"error": {"message": "no such batch", "code": "not_found"}}))

    context = server_context(TlsFiles.in_folder(folder, "router"))
    async with fake_server(answer, context) as server:
        arguments = ["batch", "--id", "batch_x", "--http", server.url, *options]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert "error: no such batch (404 not_found)\n" in result.output
