"""Measures the gain of a cached prefix: each prompt is sent twice, cold and warm.

    python -m loadtest.research.timings.prefix_reuse --tokens 1024 --repetitions 7

A cold prompt is made of random token ids, so that it is not cached; the warm one is the same again.
It needs an otherwise idle cluster.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.client import DEFAULT_ADDRESS, Client
from baton.v1.sampling_pb2 import SamplingParameters

_LOWEST_ID, _HIGHEST_ID = 100, 40_000
"""Lowest and highest token id in prompts. In a vocabulary of this size, control tokens have lower
ids."""


def measure(client: Client, prompt: list[int]) -> tuple[float, int]:
    """Send a prompt. Return the seconds to the first token, and the number of cached prompt
    tokens."""
    sampling = SamplingParameters(temperature=0.0, max_tokens=2, ignore_eos=True)
    began = time.perf_counter()
    first = None
    cached = 0
    for response in client.generate(token_ids=prompt, sampling=sampling):
        first = first or time.perf_counter() - began
        cached = max(cached, response.usage.cached_prompt_tokens)
    if first is None:
        raise RuntimeError("the answer had no token")
    return first, cached


def main(
    grpc: Annotated[str, typer.Option(help="host:port of the router's gRPC listener")] = (
        DEFAULT_ADDRESS
    ),
    tokens: Annotated[int, typer.Option(help="prompt length in tokens")] = 1024,
    repetitions: Annotated[int, typer.Option(help="prompts, each sent twice")] = 7,
) -> None:
    """Measure cold and warm prompts, and print the medians and their ratio."""
    dice = random.SystemRandom()
    cold, warm, found = [], [], []
    with Client(grpc) as client:
        measure(client, [_LOWEST_ID] * 8)
        for _ in range(repetitions):
            prompt = [dice.randrange(_LOWEST_ID, _HIGHEST_ID) for _ in range(tokens)]
            cold.append(measure(client, prompt)[0])
            seconds, cached = measure(client, prompt)
            warm.append(seconds)
            found.append(cached)
    table = Table("prompt tokens", "cached", "TTFT cold, ms", "TTFT warm, ms", "cold / warm")
    before, after = statistics.median(cold), statistics.median(warm)
    table.add_row(
        str(tokens),
        str(int(statistics.median(found))),
        f"{before * 1e3:.1f}",
        f"{after * 1e3:.1f}",
        f"{before / after:.1f}",
    )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
