"""Measures how a batch affects other requests of the same running cluster:

    python -m loadtest.research.timings.batch_bench --chats 16

Chats come one after another, with pauses, first alone and then during a batch.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from baton.client.http_api import api_errors, event_of, open_api
from baton.errors import BatonError

PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Feeling:
    """Latencies of one chat, as its client sees them, in seconds."""

    first_token_s: float
    token_s: float
    """Mean time per token after the first token."""


def ask(client: httpx.Client, model: str, number: int, tokens: int) -> Feeling:
    """Send one streamed chat with a unique prompt, and measure its latencies."""
    question = f"{number}: tell a story about a river, a boat and the number {number}."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    sent_at = time.monotonic()
    first_at = last_at = 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            choices = (event_of(line) or {}).get("choices")
            if choices and choices[0]["delta"].get("content"):
                last_at = time.monotonic()
                first_at = first_at or last_at
    return Feeling(first_at - sent_at, (last_at - first_at) / (tokens - 1))


def lines(model: str, count: int, tokens: int) -> bytes:
    """Return the input file of a batch of ``count`` requests, as JSON lines."""
    rows = []
    for number in range(count):
        prompt = f"Chapter {number}. It was a dark and stormy night, and "
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        rows.append(json.dumps(row))
    return "\n".join(rows).encode()


def draw(alone: Sequence[Feeling], beside: Sequence[Feeling]) -> Table:
    """Return a table with one row for chats alone, and one for chats during a batch."""
    table = Table("chats", "TTFT p50 ms", "TTFT max ms", "TPOT p50 ms", "TPOT max ms")
    for name, felt in (("alone", alone), ("with a batch", beside)):
        firsts = [one.first_token_s * 1e3 for one in felt]
        each = [one.token_s * 1e3 for one in felt]
        figures = (statistics.median(firsts), max(firsts), statistics.median(each), max(each))
        table.add_row(name, *(f"{figure:.0f}" for figure in figures))
    return table


def main(
    url: Annotated[
        str, typer.Option(help=("The cluster's HTTP listener."))
    ] = "http://127.0.0.1:8000",
    chats: Annotated[
        int, typer.Option(min=2, help=("Number of chats, alone and during the batch."))
    ] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 32,
    count: Annotated[
        int, typer.Option("--lines", min=1, help=("Number of lines of the batch."))
    ] = 2000,
) -> None:
    """Measure chats alone and during a batch."""
    console = Console()
    try:
        with api_errors(), open_api(url) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            for number in range(3):
                ask(client, model, number, tokens)
            alone = _series(client, model, 100, chats, tokens)
            path = _begun(client, lines(model, count, tokens))
            time.sleep(5.0)
            before, began_at = _counts(client, path), time.monotonic()
            beside = _series(client, model, 10_000, chats, tokens)
            after, took_s = _counts(client, path), time.monotonic() - began_at
            quiet_at = time.monotonic()
            time.sleep(10.0)
            rest, quiet_s = _counts(client, path), time.monotonic() - quiet_at
            client.post(f"{path}/cancel")
    except BatonError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    console.print(draw(alone, beside))
    console.print(
        f"lines a second: {(after['completed'] - before['completed']) / took_s:.1f} during chats, "
        f"{(rest['completed'] - after['completed']) / quiet_s:.1f} alone; {rest['failed']} failed"
    )


def _begun(client: httpx.Client, content: bytes) -> str:
    """Start a batch, and return the URL path by which it is queried."""
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": content}}
    file = client.post("/v1/files", **form).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return f"/v1/batches/{client.post('/v1/batches', json=body).json()['id']}"


def _counts(client: httpx.Client, path: str) -> dict[str, int]:
    counts: dict[str, int] = client.get(path).json()["request_counts"]
    return counts


def _series(client: httpx.Client, model: str, first: int, chats: int, tokens: int) -> list[Feeling]:
    felt = []
    for number in range(first, first + chats):
        felt.append(ask(client, model, number, tokens))
        time.sleep(PAUSE_S)
    return felt


if __name__ == "__main__":
    typer.run(main)
