"""A worker of whatever version of Baton is first on the path: the last release's, or this one's.

Its one argument is JSON; prints its address and the folder of its code as JSON. It uses only what
both versions have. See test_version_skew.py.
"""

from __future__ import annotations

import asyncio
import json
import sys

import baton
from baton.config.cluster import Config
from baton.host.process_end import end_with_parent
from decode_worker.role import DecodeRole
from prefill_worker.role import PrefillRole
from worker.process import WorkerProcess
from worker.settings import WorkerSettings


async def main() -> None:
    """Run until the worker has left, or this process is ended."""
    given = json.loads(sys.argv[1])
    config = Config(**given["config"])
    pool = next(one for one in config.pools if one.name == given["pool"])
    settings = WorkerSettings(
        config=config,
        pool=pool,
        slot=f"{pool.name}-0",
        model_path=given["model_path"],
        model_name="tiny",
        redis_url=given["redis_url"],
        cluster_id=given["cluster_id"],
        threads=1,
    )
    process = WorkerProcess(settings, {"prefill": PrefillRole, "decode": DecodeRole})
    record = await process.start()
    said = {"address": record.address, "code": str(baton.__path__[0])}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    await process.run()
    await process.ended()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(main())
