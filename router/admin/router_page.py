"""The /metrics page of a router."""

from __future__ import annotations

import shutil
from pathlib import Path

from baton.config.cluster import Config
from baton.telemetry.certificates import CertificateExpiry
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.page import MetricsPage


def router_page(
    metrics: RouterMetrics, config: Config, cluster_id: str, model_name: str
) -> MetricsPage:
    """Return the page of a router, or of all router processes that share a folder of metrics."""
    sides = config.tls.of("router"), config.tls.fronts
    expiry = CertificateExpiry(metrics.certificate_expiry, "router", *sides)

    def look() -> None:
        expiry.look()
        _look_at_disk(metrics, config.data_folder)

    shown = metrics.shown()
    return MetricsPage(shown, cluster_id, model_name, look, vllm=config.vllm_metrics)


def _look_at_disk(metrics: RouterMetrics, folder: Path) -> None:
    # The folder itself is made for the first file.
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is not None:
        disk = shutil.disk_usage(there)
        metrics.data_disk_free_bytes.set(disk.free)
        metrics.data_disk_total_bytes.set(disk.total)
