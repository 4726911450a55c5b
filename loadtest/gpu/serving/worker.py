"""Runs a real worker without Ray that reports its state, and whose CUDA context can be broken.

Run as a module; see ``json_worker``. The process reads ``config``, ``role``, ``slot``,
``model_path``, ``redis_url``, ``cluster_id`` and ``costs_folder``. Its hello has its incarnation,
and each answer is the result of ``look``. It ends with its input, or with the process that started
it.

SIGUSR1 makes its next step fail as after an illegal memory access. On a GPU that is the real error:
a kernel stores at an illegal address, on a separate thread. A CPU has no context that could break:
there the runner raises an error with CUDA's text, which tests everything except CUDA's part.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

import torch
from prometheus_client import Counter

from baton.config.cluster import Config
from baton.host.background import end_tasks
from baton.host.process_end import end_with_parent
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from decode_worker.role import DecodeRole
from engine.engine import Engine
from engine.scheduling.plan import StepPlan
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.common.peer_servers import SERVED_NAME
from prefill_worker.role import PrefillRole
from worker.process import WorkerProcess
from worker.settings import WorkerSettings

_ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


def look(process: WorkerProcess) -> Fields:
    """Return the state of a started worker: its blocks, sequences and received handoffs.

    ``total_blocks``; ``held_blocks``: used or in quarantine; ``running``: sequences;
    ``received_handoffs`` and ``received_bytes`` by transport; on a GPU also its ``free_bytes`` for
    all processes, and ``own_bytes``, the minimum that this process has allocated.
    """
    context = process.context
    assert context is not None, "not started"
    counts = context.engine.pool.counts()
    found: Fields = {
        "total_blocks": context.engine.pool.total,
        "held_blocks": counts.used + counts.quarantined,
        "running": len(context.engine.scheduler.running),
        "received_handoffs": _by_transport(context.metrics.handoffs, outcome="ok"),
        "received_bytes": _by_transport(context.metrics.handoff_bytes),
    }
    device = context.engine.cache.data.device
    if device.type == "cuda":
        found["free_bytes"] = torch.cuda.mem_get_info(device)[0]
        blocks = context.engine.cache.bytes.numel()
        # The blocks may be outside torch's memory.
        found["own_bytes"] = max(blocks, torch.cuda.memory_reserved(device))
    return found


def _by_transport(counter: Counter, **labels: str) -> dict[str, float]:
    """Return the values of those series of a counter that have these labels, by transport."""
    return {
        sample.labels["transport"]: sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    }


def _make_poison(engine: Engine) -> Callable[[], None]:
    """Return the function that breaks the worker when SIGUSR1 arrives. The kernel for it is
    compiled by this call.
    """
    device = engine.cache.data.device
    if device.type == "cpu":
        return lambda: setattr(engine.runner, "run", _fail)
    # Not imported without a GPU, since Triton takes half a second to import.
    from loadtest.gpu.serving.poison import ContextPoison  # noqa: PLC0415

    poison = ContextPoison(device)
    return lambda: threading.Thread(target=poison.spread, name="poison", daemon=True).start()


def _fail(plan: StepPlan) -> NoReturn:
    raise RuntimeError(_ILLEGAL_ACCESS)


def _settings(start: Fields) -> WorkerSettings:
    config = Config(**start["config"])
    return WorkerSettings(
        config=config,
        pool=next(pool for pool in config.pools if pool.role == start["role"]),
        slot=start["slot"],
        model_path=start["model_path"],
        model_name=SERVED_NAME,
        redis_url=start["redis_url"],
        cluster_id=start["cluster_id"],
        threads=1,
        costs_folder=start["costs_folder"],
    )


async def _work(asker: Asker, start: Fields) -> None:
    process = WorkerProcess(_settings(start), {"prefill": PrefillRole, "decode": DecodeRole})

    async def answer(_question: Fields) -> Fields:
        return look(process)

    tasks: list[asyncio.Task[None]] = []
    try:
        record = await process.start()
        spare_the_interpreter()
        keep_buffers()
        assert process.context is not None, "started"
        poison = await asyncio.to_thread(_make_poison, process.context.engine)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, poison)
        asker.say({"incarnation": record.incarnation})
        questions = asyncio.create_task(asker.serve(answer), name="questions")
        running = asyncio.create_task(process.run(), name="worker")
        tasks += [questions, running]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        await process.stop()
        await end_tasks(tasks)


if __name__ == "__main__":
    end_with_parent()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run_helper(_work))
