"""The /metrics page of a router."""

from __future__ import annotations

from baton.config.cluster import Config
from baton.telemetry.certificates import CertificateExpiry
from baton.telemetry.disk import look_at_disk
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
        gauges = metrics.data_disk_free_bytes, metrics.data_disk_total_bytes
        look_at_disk(config.data_folder, *gauges)

    shown = metrics.shown()
    return MetricsPage(shown, cluster_id, model_name, look, vllm=config.vllm_metrics)
