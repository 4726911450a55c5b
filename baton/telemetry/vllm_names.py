"""Series under vLLM's names, made of Baton's own when a page is read.

Dashboards made for vLLM and the Gateway API Inference Extension ask for these names, which are
those of vLLM's V1 engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
SAME: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "baton_time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "baton_inter_token_latency_seconds": ("inter_token_latency_seconds",),
        "baton_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "baton_request_latency_seconds": ("e2e_request_latency_seconds",),
        "baton_prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
        "baton_cached_prompt_tokens": ("prefix_cache_hits",),
        "baton_generated_tokens": ("generation_tokens",),
        "baton_preemptions": ("num_preemptions",),
    }
)
"""vLLM's names of families that have the same values, by Baton's name; without ``_total``."""
_SEQUENCES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}
_REASONS = {"ok": "stop", "aborted": "abort", "error": "error"}


def vllm_families(family: Metric) -> Iterator[Metric]:
    """Return what vLLM has in the place of one of Baton's families; nothing for most of them."""
    for name in SAME.get(family.name, ()):
        samples = [
            one._replace(name=f"{PREFIX}{name}{one.name.removeprefix(family.name)}")
            for one in family.samples
            if not one.name.endswith("_created")
        ]
        yield _made(name, family, family.type, samples)
    if family.name == "baton_sequences":
        for name, state in _SEQUENCES.items():
            yield _made(name, family, "gauge", _summed(name, family, "state", (state,)))
    elif family.name == "baton_kv_blocks":
        yield _made("kv_cache_usage_perc", family, "gauge", _usage(family))
    elif family.name == "baton_requests":
        yield _made("request_success", family, "counter", _ended(family))


def _made(name: str, family: Metric, kind: str, samples: list[Sample]) -> Metric:
    made = Metric(f"{PREFIX}{name}", f"vLLM's name for what {family.name} shows.", kind)
    made.samples = samples
    return made


def _summed(name: str, family: Metric, label: str, values: Collection[str]) -> list[Sample]:
    """Sum the samples that have one of ``values`` for ``label``, which the sums do not have."""
    sums: dict[frozenset[tuple[str, str]], float] = {}
    for one in family.samples:
        if one.labels[label] in values:
            key = frozenset((known, value) for known, value in one.labels.items() if known != label)
            sums[key] = sums.get(key, 0.0) + one.value
    return [Sample(f"{PREFIX}{name}", dict(key), value) for key, value in sums.items()]


def _usage(family: Metric) -> list[Sample]:
    name = "kv_cache_usage_perc"
    taken = _summed(name, family, "state", ("used", "quarantined"))
    used = {frozenset(one.labels.items()): one.value for one in taken}
    every = _summed(name, family, "state", {one.labels["state"] for one in family.samples})
    return [
        one._replace(value=used.get(frozenset(one.labels.items()), 0.0) / max(one.value, 1.0))
        for one in every
    ]


def _ended(family: Metric) -> list[Sample]:
    ended = Metric(family.name, "", family.type)
    ended.samples = [
        one._replace(
            labels={name: value for name, value in one.labels.items() if name != "outcome"}
            | {"finished_reason": _REASONS[one.labels["outcome"]]}
        )
        for one in family.samples
        if one.name.endswith("_total") and one.labels["outcome"] in _REASONS
    ]
    codes = {one.labels["code"] for one in ended.samples}
    return _summed("request_success_total", ended, "code", codes)
