"""The free space of a folder as metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.telemetry.disk import look_at_disk
from baton.telemetry.worker_metrics import WorkerMetrics


def test_the_disk_of_a_run_directory(tmp_path: Path) -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    look_at_disk(tmp_path / "away", metrics.run_disk_free_bytes, metrics.run_disk_total_bytes)
    value = metrics.registry.get_sample_value
    assert value("baton_run_disk_total_bytes") == shutil.disk_usage(tmp_path).total
    assert 0 < (value("baton_run_disk_free_bytes") or 0) <= shutil.disk_usage(tmp_path).total
