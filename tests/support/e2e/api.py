"""Shared by the tests of api and by other tests."""

from __future__ import annotations

import re
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.e2e.cluster import UpProcess

DEADLINE_S = 120.0


ANSWERED = re.compile(r"# (\d+) of (\d+) workers answered")


def series(cluster: UpProcess, name: str, **labels: str) -> float:
    """The sum of a series over its other labels, from the page of the whole cluster.

    A busy worker may be late with its own page: it is asked until all of them are there.
    """
    page, end = "", time.monotonic() + DEADLINE_S
    while not (told := ANSWERED.match(page)) or told[1] != told[2]:
        assert time.monotonic() < end, page[:400]
        page = httpx.get(f"{cluster.http}/metrics/cluster", timeout=DEADLINE_S).text
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples]
    everywhere = {"cluster": cluster.cluster_id, "model_name": cluster.model}.items()
    assert all(everywhere <= sample.labels.items() for sample in samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
