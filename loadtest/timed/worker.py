"""A worker process with the timed engine: all of a real one's but the model's computing.

Run as a module; see ``line_service``. Nobody reaches it by way of the command line or a
configuration. Everything but the steps is owned by the process's event loop.

It is told ``config``, ``pool``, ``slot``, ``model_path``, ``model_name``, ``redis_url``,
``cluster_id``, ``number``, ``workers_here``, and the coefficients ``prefill`` and ``step``. It says
hello with its process id and incarnation, and answers every question with its steps' timings since
the last one. It ends with its input, and with a drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import torch

from baton.background import end_tasks
from baton.config import Config
from decode_worker.role import DecodeRole
from engine.engine import Engine
from engine.kv_cache import Allocate
from engine.model_config import load_model_config
from loadtest.line_service import Asker, Fields, run_helper
from loadtest.simulator.fitted_costs import FittedCosts
from loadtest.timed.engine import build_timed_engine
from loadtest.timed.step_model import TimedStepModel
from prefill_worker.role import PrefillRole
from worker.calibration import Run
from worker.process import WorkerProcess
from worker.role import RoleFactory
from worker.settings import WorkerSettings
from worker.step_costs import StepCosts


class TimedWorker:
    """A worker process, and the model that it believes in."""

    def __init__(self, start: Fields) -> None:
        """``start``: see the module's text. Raises ConfigError for a folder that is no model's."""
        settings = _settings(start)
        self._costs = StepCosts(tuple(start["prefill"]), tuple(start["step"]))
        vocabulary = load_model_config(Path(settings.model_path)).vocab_size
        self._model = TimedStepModel(FittedCosts(self._costs), vocabulary)
        roles: dict[str, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}
        self.process = WorkerProcess(settings, roles, self._build, self._calibrate)

    def _build(self, settings: WorkerSettings, allocate: Allocate) -> Engine:
        return build_timed_engine(settings, self._model, allocate)

    def _calibrate(self, engine: Engine, run: Run) -> StepCosts:
        """What the cost model says, without a step: others may be starting on the same cores."""
        return self._costs

    async def answer(self, question: Fields) -> Fields:
        """The steps since the last question, or since it serves: a list of each column."""
        taken = self._model.take_timings()
        return {
            "asked_s": [timing.asked_s for timing in taken],
            "took_s": [timing.took_s for timing in taken],
            "gap_s": [timing.gap_s for timing in taken],
        }

    async def serve(self, asker: Asker) -> None:
        """Until there are no more questions, or a drain is over. Raises what has broken it."""
        record = await self.process.start()
        asker.say({"pid": os.getpid(), "incarnation": record.incarnation})
        questions = asyncio.create_task(asker.serve(self.answer), name="questions")
        running = asyncio.create_task(self.process.run(), name="worker")
        try:
            await asyncio.wait({questions, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                await self.process.ended()
        finally:
            await self.process.stop()
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
    await TimedWorker(start).serve(asker)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Nothing of torch computes: its threads would only wait beside those that serve.
    torch.set_num_threads(1)
    asyncio.run(run_helper(_work))
