"""Makes docs/reference/metrics.md from what baton/telemetry declares."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.telemetry.metrics import RouterMetrics, SupervisorMetrics
from baton.telemetry.tenant_series import MAX_CALLERS
from baton.telemetry.worker_metrics import WorkerMetrics
from tools.reference.markdown import anchor, cell, code, codes, made_from, table

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
    "missing": "0 or 1",
    "flight": "lines",
    "memory": "steps",
}
"""Unit of a metric, by the last word of the metric's name. If that word is not listed here, it
names what the metric counts."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of metric series, such as a counter with its labels."""

    page: str
    """The process whose metrics page has the family: ``router``, ``worker`` or ``supervisor``."""
    name: str
    """Name of the family, without a counter's ``_total``."""
    kind: str
    """Type of the metric: ``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...]
    """Names of the labels, without a histogram's ``le``."""
    meaning: str

    @property
    def shown_name(self) -> str:
        """Return the name of the metric as queries write it. For a histogram it has no ``_bucket``,
        ``_sum`` or ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """Return the unit of the metric: what a value of 1 means."""
        last = self.name.rpartition("_")[2]
        return _UNITS.get(last, last)


def families() -> tuple[Family, ...]:
    """Return the families that ``baton/telemetry`` declares, by page; some are on two pages."""
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


_HEAD = f"""# Metrics

[Observability](../how-to/operate/observability.md) describes how to scrape metrics, the
dashboards and the alerts.

Times are in seconds, sizes in bytes. A histogram `x` has the series `x_bucket` (with the label
`le`), `x_sum` and `x_count`. No label holds text of a client. Two pages may have a series of the
same name: labels tell them apart, so that sums over pages are right.

Every series has the labels `cluster` (the [`cluster_id`](configuration.md#cluster_id)) and
`model_name` (the name in the API) too, on every page. Without a `cluster_id` each start draws a new
name: set one before you keep series or alert on them.

{made_from("`baton/telemetry`")}
"""
_PAGES = {
    "router": (
        "A router",
        "At `/metrics` of the HTTP port: sums over all processes behind it (`--routers N`).",
    ),
    "worker": (
        "A worker",
        "Each has a page of its own, on a port that the kernel chose; `/metrics/targets` of a"
        " router lists them.",
    ),
    "supervisor": ("The supervisor", "It has a page, too, which `baton status` names."),
}
_COLUMNS = ("series", "type", "labels", "unit", "meaning")
LABELS = {
    "action": "`to_prefill`, `to_decode`, `grow`, `shrink`",
    "call": "which call to Redis: `registry_read`, `prefix_lookup`, `registry_put`,"
    " `index_publish`",
    "cause": "why a worker died: `out_of_memory`, `ray_memory_monitor`, `no_space`, `sigkill`,"
    " `crash`, `node_lost`, `hung`, `error`, `unknown`",
    "class": "context-length class, as the configuration names it; `unknown` for requests that"
    " ended before they were tokenized",
    "code": "the error's code, as in the answer; empty without one",
    "decision": "`remote`: a prefill worker computes the prompt; `local`: the decode worker",
    "drafter": "what drafted: `ngram`, `draft`, `eagle`, `medusa`",
    "file": "name of the certificate's file",
    "key": "public name of the API key; empty without one, and `other` beyond the first"
    f" {MAX_CALLERS} that a router process sees",
    "kind": "of costs `input`, `cached_input`, `output`; of tokens `prompt`, `cached_prompt`,"
    " `generated`",
    "mode": "`live`, or `dry_run`: nothing follows",
    "outcome": "of requests `ok`, `error`, `shed`, `aborted`; of handoffs and pulls `ok`,"
    " `checksum`, `error` and others; of lookups, loads and lines as their meaning says",
    "part": "part of a time: "
    "[Why is TTFT high?](../how-to/operate/observability.md#why-is-ttft-high)",
    "peer": "slot of the worker that blocks are sent to",
    "pool": "pool, as the configuration names it",
    "process": "`router`, `supervisor`, or the slot of a worker",
    "reason": "why: a short word of ours",
    "result": "`found`, `missing`",
    "role": "`prefill`, `decode`; of a router `router`",
    "slo": "`ttft`, `tpot`",
    "state": "of sequences `running`, `waiting`; of blocks `free`, `used`, `cached`,"
    " `quarantined`; of a slot as `baton status` shows it",
    "tenant": "tenant, as the configuration names it; of costs `other` for those that it does not"
    " name",
    "tier": "`host`, `disk`",
    "transport": "`shm`, `grpc`, `gloo`, `nccl`, `nixl`, `cuda_ipc`; `none` where nothing"
    " travelled",
    "worker": "slot of the worker, `decode-0`: it outlives each process in it",
}


def reference() -> str:
    """Return the Markdown text of the page on metrics. Raises KeyError for a label that is not
    described."""
    found = families()
    parts = [_HEAD]
    known: set[str] = set()
    for page, (title, where) in _PAGES.items():
        own = [family for family in found if family.page == page]
        rows = [_row(family, first=family.name not in known) for family in own]
        known |= {family.name for family in own}
        parts.append(f"\n## {title}\n\n{where}\n\n{table(_COLUMNS, rows)}\n")
    used = {label for family in found for label in family.labels}
    labels = ((f"{anchor(f'label-{one}')}{code(one)}", LABELS[one]) for one in sorted(used))
    parts.append(f"\n## Labels\n\n{table(('label', 'values'), labels)}\n")
    return "".join(parts)


def _row(family: Family, *, first: bool) -> tuple[str, ...]:
    """Return the table row of a metric family. If ``first`` is true, no earlier page has the
    family, and the row gets an anchor: anchors must be unique."""
    return (
        f"{anchor(family.shown_name) if first else ''}{code(family.shown_name)}",
        family.kind,
        codes(family.labels) or "none",
        family.unit,
        cell(family.meaning),
    )
