"""A page with the metrics of the whole cluster, in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.security.tls import PeerRole
from router.http.metrics_pages import MetricsPages

_DEADLINE_S = 2.0
_PREFIXES = ("baton_", "vllm:")
_SUMMED = frozenset({"counter", "histogram", "summary"})


async def cluster_page(
    own: CollectorRegistry,
    addresses: Sequence[str],
    supervisor: str | None,
    pages: MetricsPages,
) -> bytes:
    """Return the series of this router, the supervisor and all workers, merged.

    ``addresses`` (of workers) and ``supervisor`` are host:port; ``pages`` fetches the pages there.
    A comment names each process that does not answer.
    """
    asked = [_Page(address, "worker") for address in addresses]
    asked += [] if supervisor is None else [_Page(supervisor, "supervisor")]
    found, failures = await _fetch_all(asked, pages)
    texts = [generate_latest(own).decode(), *found]
    answered = len([address for address in addresses if address not in failures])
    comments = [f"# {answered} of {len(addresses)} workers answered\n"]
    comments += [f"# {address} did not answer: {why}\n" for address, why in failures.items()]
    return "".join(comments).encode() + merge_pages(texts)


def merge_pages(pages: Iterable[str]) -> bytes:
    """Merge pages of metrics: each metric family appears once, with the series of all pages.

    Equal series are summed, except for gauges, which keep the last value. Families of other
    libraries, such as a process's memory, name no worker and are dropped. Raises ValueError for an
    invalid page.
    """
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            if family.name.startswith(_PREFIXES) and not family.name.endswith("_created"):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples.extend(family.samples)
    for family in families.values():
        _unite(family)
    return generate_latest(cast(CollectorRegistry, _Collected(families.values())))


def _unite(family: Metric) -> None:
    united: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in family.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        known = united.get(key)
        if known is not None and family.type in _SUMMED:
            sample = sample._replace(value=known.value + sample.value)  # noqa: PLW2901
        united[key] = sample
    family.samples = list(united.values())


class _Collected:
    """Stands in for a metrics registry: it has the method that prometheus_client's
    ``generate_latest`` calls."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


@dataclass(frozen=True, slots=True)
class _Page:
    """Address of a /metrics page, and the role that its server's certificate must name."""

    address: str
    role: PeerRole


async def _fetch_all(
    asked: Sequence[_Page], pages: MetricsPages
) -> tuple[list[str], dict[str, str]]:
    async with pages.client(_DEADLINE_S) as client:
        answers = await asyncio.gather(
            *(_fetch(pages, client, page) for page in asked), return_exceptions=True
        )
    found: list[str] = []
    failures: dict[str, str] = {}
    for page, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            found.append(answer)
        elif isinstance(answer, Exception):
            failures[page.address] = type(answer).__name__
        else:
            raise answer
    return found, failures


async def _fetch(pages: MetricsPages, client: httpx.AsyncClient, page: _Page) -> str:
    text = await pages.fetch(client, page.address, page.role, _DEADLINE_S)
    # Parse the page here too, so that an invalid page counts as no answer.
    list(text_string_to_metric_families(text))
    return text
