"""All series that Baton exports, as data: for docs/metrics.md, and to check rules by."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.telemetry.metrics import RouterMetrics, SupervisorMetrics
from baton.telemetry.worker_metrics import WorkerMetrics

_PROCESSES = (
    ("router", RouterMetrics),
    ("worker", WorkerMetrics),
    ("supervisor", SupervisorMetrics),
)
_UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "ratio": "ratio, 0 to 1",
    "utilization": "ratio, 0 to 1",
    "second": "tokens per second",
    "hour": "currency per hour",
    "state": "0 or 1",
    "flight": "lines",
}
"""By a name's last word; any other word is what is counted itself."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of series."""

    page: str
    """Whose page has it: ``router``, ``worker`` or ``supervisor``."""
    name: str
    """Without a counter's ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...]
    """Without a histogram's ``le``."""
    meaning: str

    @property
    def shown_name(self) -> str:
        """As queries write it; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """What a value of 1 is."""
        last = self.name.rpartition("_")[2]
        return _UNITS.get(last, last)

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """The labels of each of its series, by the series' name."""
        labels = frozenset(self.labels)
        if self.kind != "histogram":
            return {self.shown_name: labels}
        return {
            f"{self.name}_bucket": labels | {"le"},
            f"{self.name}_sum": labels,
            f"{self.name}_count": labels,
        }


def families() -> tuple[Family, ...]:
    """Every family that ``baton/telemetry`` declares, page by page; some are on two
    pages."""
    found: list[Family] = []
    for page, kind in _PROCESSES:
        metrics = vars(kind(CollectorRegistry())).values()
        found += (_family(page, one) for one in metrics if isinstance(one, MetricWrapperBase))
    return tuple(found)


def _family(page: str, metric: MetricWrapperBase) -> Family:
    (described,) = metric.describe()
    return Family(
        page,
        described.name,
        described.type,
        tuple(metric._labelnames),
        described.documentation,
    )


def known_series() -> dict[str, frozenset[str]]:
    """The labels of every series of a cluster, by its name."""
    return {name: labels for family in families() for name, labels in family.series.items()}
