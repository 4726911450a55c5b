"""A router's dispatcher in a process of its own, which another process may stop.

Arguments: the model's folder, Redis' URL, the cluster's id. It says ``streaming`` once all of its
requests have tokens, and then one line for each that ends: its number of tokens, or its error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import TrafficCounts
from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from baton.errors import BatonError
from baton.request import Principal
from baton.sampling_params import SamplingParams
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.metrics import RouterMetrics
from router.core.request import GenerationRequest
from router.dispatch.dispatcher import ClusterDispatcher
from router.text.tokenizer import Tokenizer
from router.workers import worker_links

REQUESTS = 4
TOKENS = 400
HANG_S = 0.4


def say(what: object) -> None:
    """Print one line."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main(model: str, redis_url: str, cluster_id: str) -> None:
    """Run some requests."""
    worker_links.SILENCE_S = HANG_S
    worker_links._SILENT_HEARTBEATS = 1
    advanced = AdvancedConfig(hang_s=HANG_S, engine_hang_s=2 * HANG_S, heartbeat_s=0.1)
    config = Config(dtype="float32", advanced=advanced)
    async with redis_client(redis_url) as client:
        dispatcher = ClusterDispatcher(
            config,
            Tokenizer.load(Path(model)),
            RouterMetrics(CollectorRegistry()),
            TrafficCounts(),
            Registry(client, cluster_id),
            PrefixIndex(client, cluster_id),
        )
        await dispatcher.start()
        await dispatcher.settled()
        streaming = [asyncio.Event() for _ in range(REQUESTS)]

        async def one(number: int) -> None:
            sampling = SamplingParams(
                temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True
            )
            request = GenerationRequest(
                f"r{number}", tuple(range(3, 40 + number)), sampling, Principal(), 120.0
            )
            count = 0
            try:
                async for delta in dispatcher.generate(request):
                    count += len(delta.token_ids)
                    streaming[number].set()
                say(count)
            except BatonError as error:
                say(error)
            finally:
                streaming[number].set()

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(one(number))
            for each in streaming:
                await each.wait()
            say("streaming")
        say(sum(link.breaker.openings for link in dispatcher.workers.all()))
        await dispatcher.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
