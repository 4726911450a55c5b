"""A worker process whose engine is timed."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError
from decode_worker.role import DecodeRole
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from engine.kv.kv_cache import Allocate
from engine.parallel.ranks import Leader
from loadtest.research.timed.engine import build_timed_engine
from loadtest.research.timed.model_folder import read_step_costs
from loadtest.research.timed.step_model import TimedStepModel
from planning.simulator.costs.step_model import FittedCosts
from prefill_worker.role import PrefillRole
from worker.cores.core_board import CoreBoard
from worker.costs.step_costs import StepCosts
from worker.process import WorkerProcess
from worker.role import RoleFactory
from worker.settings import WorkerSettings


class TimedProcess:
    """A real ``WorkerProcess``, and the model that it believes in."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Its model is a folder of ``write_model_folder``. Raises ConfigError for another one."""
        folder = Path(settings.model_path)
        self._costs = read_step_costs(folder)
        self.model = TimedStepModel(FittedCosts(self._costs), load_model_config(folder).vocab_size)
        roles: dict[str, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}
        self.process = WorkerProcess(settings, roles, self._start_engine, self._measure)

    def _start_engine(
        self, settings: WorkerSettings, allocate: Allocate, lead: Leader | None
    ) -> Engine:
        if lead is not None:
            raise ConfigError("timed workers have one rank: take tp 1 and cp 1")
        return build_timed_engine(settings, self.model, allocate)

    def _measure(
        self, settings: WorkerSettings, engine: Engine, board: CoreBoard | None
    ) -> StepCosts:
        """What the cost model says, without a step: others may be starting on the same cores."""
        return self._costs
