"""A process's metrics page: its series, with the labels that say which cluster it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.telemetry.vllm_names import vllm_families

PAGE_LABELS = ("cluster", "model_name")
"""The labels of every series on every page. Declarations of metrics do not name them."""


class MetricsPage(CollectorRegistry):
    """What a page shows of a registry. All series get the labels ``cluster`` and ``model_name``.

    Several clusters in one Prometheus have workers of the same name: these labels tell them apart.
    """

    def __init__(
        self,
        source: Collector,
        cluster: str,
        model_name: str,
        look: Callable[[], None],
        *,
        vllm: bool = False,
    ) -> None:
        """``look`` sets what is measured for each page alone; any thread may call it. ``vllm`` adds
        series under vLLM's names."""
        super().__init__()
        self._source = source
        self._values = cluster, model_name
        self._look = look
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        """Return the families of the registry, as they are now, with the labels of the page."""
        self._look()
        shared = dict(zip(PAGE_LABELS, self._values, strict=True))
        for family in self._source.collect():
            family.samples = [
                sample._replace(labels={**shared, **sample.labels}) for sample in family.samples
            ]
            yield family
            if self._vllm:
                yield from vllm_families(family)

    def restricted_registry(self, names: Iterable[str]) -> MetricsPage:  # type: ignore[override]
        """Return the part of the page that a query ``name[]`` asks for."""
        assert isinstance(self._source, CollectorRegistry)
        part = self._source.restricted_registry(names)
        return MetricsPage(part, *self._values, self._look, vllm=self._vllm)
