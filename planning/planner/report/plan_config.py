"""Writes a plan as the configuration of `baton serve`, and as values of the Helm chart."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.config.choices import MIB
from baton.config.cluster import Config
from planning.planner.cluster_kind import WorkerKind
from planning.planner.plan import Plan
from planning.simulator.costs.hardware import ACCELERATORS

_SIMULATED = (
    "max_model_len",
    "policy",
    "local_prefill",
    "slo_ttft_s",
    "slo_tpot_s",
    "admission",
    "max_queue_s",
    "max_waiting_requests",
    "request_deadline_s",
)
"""Configuration fields that were inputs of the plan, and are copied to its output. Other fields of
the operator are not copied, since they may be secret."""


_YAML = (".yaml", ".yml")


def plan_file(path: Path, plan: Plan, config: Config, about: str) -> str:
    """Return the text to write to the file ``path``. It is Helm values if the name ends in .yaml or
    .yml, and TOML otherwise."""
    write = plan_values if path.suffix in _YAML else plan_toml
    return write(plan, config, about)


def plan_values(plan: Plan, config: Config, about: str) -> str:
    """Return a plan as values for `helm install --values` of deploy/helm/baton: a whole cluster in
    a pod.

    ``config`` is the simulated configuration. ``about`` is one line of text that describes the
    inputs of the plan.
    """
    text = plan_toml(plan, config, about)
    values: dict[str, Any] = {"config": tomllib.loads(text)}
    kind, counts = plan.chosen.kind, plan.chosen.counts
    pools = ((kind.prefill, counts.prefill), (kind.decode, counts.decode))
    gpus = sum(one.gpus * count for one, count in pools if one.gpu in ACCELERATORS)
    if gpus:
        values["standalone"] = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    lines = [
        "# Written by `baton plan`, for `helm install --values` of deploy/helm/baton,",
        "# with the model given by --set config.model=….",
        *(line for line in text.splitlines()[1:] if line.startswith("#")),
        # JSON is valid YAML.
        json.dumps(values, indent=2, ensure_ascii=False),
    ]
    return "\n".join(lines) + "\n"


def plan_toml(plan: Plan, config: Config, about: str) -> str:
    """Return a plan as TOML. ``config`` is the simulated configuration; ``about`` is one line of
    text that describes the inputs of the plan."""
    chosen = plan.chosen
    over_all = chosen.whole or chosen.peak
    if not chosen.counts.prefill:
        config = config.model_copy(update={"local_prefill": "auto"})
    lines = [
        "# Written by `baton plan`, for `baton serve --config` with the model as its argument.",
        f"# {about}",
        f"# Target: {plan.target:.0%} meet the SLOs; simulated: {over_all.attainment:.1%}, and "
        f"{chosen.peak.attainment:.1%} in the busiest part.",
        "",
        *(f"{name} = {_value(getattr(config, name))}" for name in _SIMULATED),
        f"# Needs {chosen.kind.transport.needs}.",
        f"transport = {_value(chosen.kind.transport.name)}",
        *_pool("prefill", chosen.kind.prefill, chosen.counts.prefill),
        *_pool("decode", chosen.kind.decode, chosen.counts.decode),
    ]
    for one in config.classes:
        fields = one.model_dump(exclude_none=True, exclude_defaults=True)
        lines += [
            "",
            "[[classes]]",
            *(f"{name} = {_value(value)}" for name, value in fields.items()),
        ]
    return "\n".join(lines) + "\n"


def _pool(role: str, kind: WorkerKind, count: int) -> Iterator[str]:
    profile = kind.profile
    yield from ("", "[[pools]]", f"name = {_value(role)}", f"role = {_value(role)}")
    yield f"count = {count}"
    if kind.gpus > 1:
        yield (
            "# Workers with several GPUs have never run, only workers with several processes on "
            "CPUs."
        )
        yield f"tp = {kind.gpus}"
    if kind.gpu in ACCELERATORS:
        yield f"# {kind.name}"
        yield 'device = "cuda"'
        # This is the number for each rank.
        yield f"resources = {_value({'GPU': 1})}"
    else:
        yield f"kv_pool_mib = {max(1, round(profile.kv_tokens * profile.kv_token_bytes / MIB))}"
    yield f"max_sequences = {profile.max_sequences}"
    yield f"chunk_tokens = {profile.chunk_tokens}"


def _value(value: Any) -> str:
    """Format a value for TOML, in which strings and lists are written as in JSON."""
    if isinstance(value, Mapping):
        parts = ", ".join(f"{name} = {_value(one)}" for name, one in value.items())
        return f"{{ {parts} }}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
