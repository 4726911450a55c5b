"""A worker process with the timed engine: a real one without the model's computation.

Run as a module; see ``json_worker``. Neither the command line nor a configuration can select it.
The process's event loop owns everything except the steps.

It reads ``config``, ``pool``, ``slot``, ``model_path``, ``model_name``, ``redis_url``,
``cluster_id``, ``number`` and ``workers_here``. Its hello has its process id and incarnation, and
each answer has its steps' timings since the last one. The process ends when its input ends, and
after a drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import torch

from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.host.background import end_tasks
from decode_worker.role import DecodeRole
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from engine.kv.kv_cache import Allocate
from engine.parallel.ranks import Leader
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.research.timed.engine import TimedStepModel, build_timed_engine
from loadtest.research.timed.model_folder import read_step_costs
from planning.simulator.costs.step_model import FittedCosts
from prefill_worker.role import PrefillRole
from worker.cores.core_board import CoreBoard
from worker.costs.step_costs import StepCosts
from worker.process import WorkerProcess
from worker.role import RoleFactory
from worker.settings import WorkerSettings


class TimedProcess:
    """A real ``WorkerProcess`` with a timed model."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Make a worker process for a model folder of ``write_model_folder``.

        Raises ConfigError for any other folder.
        """
        folder = Path(settings.model_path)
        self._costs = read_step_costs(folder)
        self.model = TimedStepModel(FittedCosts(self._costs), load_model_config(folder).vocab_size)
        roles: dict[str, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}
        self.process = WorkerProcess(settings, roles, self._start_engine, self._measure)

    def _start_engine(
        self, settings: WorkerSettings, allocate: Allocate, lead: Leader | None
    ) -> Engine:
        if lead is not None:
            raise ConfigError("timed workers have one rank: use tp 1 and cp 1")
        return build_timed_engine(settings, self.model, allocate)

    def _measure(
        self, settings: WorkerSettings, engine: Engine, board: CoreBoard | None
    ) -> StepCosts:
        """Return the costs of the cost model. No step is measured, because other workers that start
        on the same cores would disturb the measurement."""
        return self._costs


class TimedWorker:
    """A timed worker process that answers questions about its steps."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Make a worker. Raises ConfigError if the model's folder is not of
        ``write_model_folder``."""
        timed = TimedProcess(settings)
        self._model, self._process = timed.model, timed.process

    async def answer(self, question: Fields) -> Fields:
        """Return the timings of steps since the last question, or since the start, as one list for
        each column.
        """
        taken = self._model.take_timings()
        return {
            "asked_s": [timing.asked_s for timing in taken],
            "took_s": [timing.took_s for timing in taken],
            "gap_s": [timing.gap_s for timing in taken],
        }

    async def serve(self, asker: Asker) -> None:
        """Answer questions until no more follow, or until a drain of this worker has ended. If the
        worker has failed, raise its error.
        """
        record = await self._process.start()
        asker.say({"pid": os.getpid(), "incarnation": record.incarnation})
        questions = asyncio.create_task(asker.serve(self.answer), name="questions")
        running = asyncio.create_task(self._process.run(), name="worker")
        try:
            await asyncio.wait({questions, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                await self._process.ended()
        finally:
            await self._process.stop()
            await end_tasks([questions, running])


def _settings(start: Fields) -> WorkerSettings:
    config = Config(**start["config"])
    return WorkerSettings(
        config=config,
        pool=next(pool for pool in config.pools if pool.name == start["pool"]),
        slot=start["slot"],
        model_path=start["model_path"],
        model_name=start["model_name"],
        redis_url=start["redis_url"],
        cluster_id=start["cluster_id"],
        threads=1,
        number=start["number"],
        workers_here=start["workers_here"],
    )


async def _work(asker: Asker, start: Fields) -> None:
    await TimedWorker(_settings(start)).serve(asker)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Torch computes nothing here: its threads would only wait next to serving ones.
    torch.set_num_threads(1)
    asyncio.run(run_helper(_work))
