"""From a worker's death to its next life in the registry, of the demo model, under `baton serve`.

    python -m tests.support.e2e.restart_times --times 10
    BATON_ADVANCED__STANDBY=false python -m tests.support.e2e.restart_times --times 10

The registry is read every 5 ms, as routers do: a worker that is listed gets requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time

from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from tests.support.e2e.cluster import UpProcess

SLOT = "decode-0"
REST_S = 35.0
"""Between two deaths: the slot has no past ones any more (``HEALTHY_S``), which would delay its
next life, the machine is idle again, and a warm standby is there (deploy/workers/standby.py)."""
_MAX_S = 60.0


async def next_life(registry: Registry, slot: str, but: str) -> str:
    """The incarnation of the slot that is another one, once it is listed."""
    async with asyncio.timeout(_MAX_S):
        while True:
            for record in (await registry.all()).values():
                if record.slot == slot and record.incarnation != but:
                    return record.incarnation
            await asyncio.sleep(0.005)


async def measure(up: UpProcess, slot: str, times: int) -> list[float]:
    """Seconds of each restart."""
    took = []
    async with redis_client(up.state.redis_url) as client:
        registry = Registry(client, up.cluster_id)
        incarnation = await next_life(registry, slot, "")
        for _ in range(times):
            await asyncio.sleep(REST_S)
            pid = up.state.processes[slot]
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            incarnation = await next_life(registry, slot, incarnation)
            took.append(time.monotonic() - began)
            sys.stderr.write(f"{took[-1]:.2f} s\n")
            while up.state.processes.get(slot) == pid:
                await asyncio.sleep(0.05)
    return took


def main() -> None:
    """Print what was measured, as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=10)
    options.add_argument("--slot", default=SLOT)
    given, more = options.parse_known_args()
    with UpProcess(*more) as up:
        up.wait_ready()
        took = asyncio.run(measure(up, given.slot, given.times))
    summary = {
        "median_s": round(statistics.median(took), 2),
        "mean_s": round(statistics.mean(took), 2),
        "longest_s": round(max(took), 2),
        "all_s": [round(one, 2) for one in took],
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
