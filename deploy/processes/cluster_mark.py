"""The mark by which every process of one cluster is found: two variables of its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

CLUSTER_VARIABLE = "BATON_CLUSTER_ID"
RUN_VARIABLE = "BATON_RUN_DIRECTORY"


@dataclass(frozen=True, slots=True)
class ClusterMark:
    """Marks the processes of one cluster.

    The cluster id alone would not do: it is also a setting, so an operator's own shell may carry
    it. No two runs share a run directory.
    """

    cluster_id: str
    run_directory: Path

    @property
    def variables(self) -> dict[str, str]:
        """What a child's environment carries."""
        return {CLUSTER_VARIABLE: self.cluster_id, RUN_VARIABLE: str(self.run_directory)}

    def environment(self) -> dict[str, str]:
        """This process's environment with the mark added."""
        return {**os.environ, **self.variables}

    def processes(self) -> list[psutil.Process]:
        """Every living process that carries the mark; dead ones not yet waited for don't."""
        return [process for process in psutil.process_iter() if self._is_on(process)]

    def _is_on(self, process: psutil.Process) -> bool:
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            return False
        return self.variables.items() <= environment.items()
