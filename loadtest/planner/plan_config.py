"""A plan as the configuration of `baton up`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from baton.config import MIB, Config
from loadtest.planner.cluster_kind import WorkerKind
from loadtest.planner.plan import Plan
from loadtest.simulator.hardware import ACCELERATORS

_SIMULATED = (
    "policy",
    "local_prefill",
    "slo_ttft_s",
    "slo_tpot_s",
    "admission_slo_factor",
    "max_waiting_requests",
    "priority_step_s",
    "request_deadline_s",
)
"""Fields that the plan was found with. Whatever else an operator has set is not repeated: it may be
a secret."""


def plan_toml(plan: Plan, config: Config, about: str) -> str:
    """TOML. ``config`` is the one that was simulated; ``about``, a line, says what was asked."""
    chosen = plan.chosen
    over_all = chosen.whole or chosen.peak
    lines = [
        "# Written by `baton plan`; `baton up --config` takes it, with the model named by --model.",
        f"# {about}",
        f"# {plan.target:.0%} were to meet the SLOs; simulated: {over_all.attainment:.1%}, and"
        f" {chosen.peak.attainment:.1%} in the busiest part.",
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
        yield f"# tp = {kind.gpus}: GPUs of a worker. Workers of several GPUs are not built yet:"
        yield "# until then each of these has one, and is not the one that was simulated."
    if kind.gpu in ACCELERATORS:
        yield f"# {kind.name}"
        yield 'device = "cuda"'
        yield f"resources = {_value({'GPU': kind.gpus})}"
    else:
        yield f"kv_pool_mib = {max(1, round(profile.kv_tokens * profile.kv_token_bytes / MIB))}"
    yield f"max_sequences = {profile.max_sequences}"
    yield f"chunk_tokens = {profile.chunk_tokens}"


def _value(value: Any) -> str:
    """As TOML writes it: strings and lists as JSON does."""
    if isinstance(value, Mapping):
        parts = ", ".join(f"{name} = {_value(one)}" for name, one in value.items())
        return f"{{ {parts} }}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
