"""What one worker is: by its accelerator, or by a profile that `baton calibrate` wrote."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from planning.simulator.costs.analytical_costs import (
    DEFAULT_EFFICIENCY,
    AnalyticalCosts,
    Efficiency,
)
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.costs.model_shape import DEFAULT_MODEL, ModelShape, model_shape
from planning.simulator.costs.sharing import ALONE, Sharing
from planning.simulator.costs.step_model import FittedCosts, StepCostModel
from worker.costs.step_costs import Coefficients, StepCosts


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Tokens, bytes, seconds."""

    name: str
    costs: StepCostModel
    kv_tokens: int
    """Tokens whose KV its pool holds."""
    kv_token_bytes: float
    """KV of one of them."""
    layers: int
    context_length: int
    """Most tokens of a sequence, by the model."""
    wire_bytes_per_s: float
    """At which KV leaves, and comes."""
    max_sequences: int = 256
    """Most in one step."""
    chunk_tokens: int = 8192
    """Most tokens in one step."""
    chunk_keys: int = 0
    """See ``engine.scheduling.scheduler.SchedulerLimits``."""
    is_cpu: bool = False
    """Whether it plans ahead as workers on CPUs do."""
    handoff_s: float = 0.002
    """What a handoff takes besides its bytes: the commit and its answer."""
    call_s: float = 0.0005
    """One message between router and worker, or between workers, one way."""
    gpus: int = 1
    """How many there are in it."""
    sharing: Sharing = ALONE
    """What others of its host cost it, where workers share one."""


PROFILE_VERSION = 1
"""What was added since may be lacking: then it is as if nobody shared a host."""
_MEMORY_SHARE = 0.9
"""As ``gpu_memory_fraction`` by default."""
_ACTIVATION_BYTES = 2e9
"""What a GPU's memory holds besides weights and KV."""


def gpu_profile(
    name: str,
    model: ModelShape,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    *,
    tensor_parallel: int = 1,
    weight_bytes: float = 2.0,
    max_sequences: int = 256,
    chunk_tokens: int = 8192,
) -> WorkerProfile:
    """A worker of ``tensor_parallel`` GPUs. Raises ConfigError where the model does not fit."""
    if name not in ACCELERATORS:
        raise ConfigError(f"no accelerator is called {name!r}; known: {', '.join(ACCELERATORS)}")
    gpu = ACCELERATORS[name]
    costs = AnalyticalCosts(
        gpu, model, efficiency, weight_bytes=weight_bytes, tensor_parallel=tensor_parallel
    )
    memory = tensor_parallel * (gpu.memory_bytes * _MEMORY_SHARE - _ACTIVATION_BYTES)
    room = memory - model.all_weights * weight_bytes
    kv_tokens = int(room / costs.kv_token_bytes)
    if kv_tokens < 1:
        raise ConfigError(
            f"{model.name} leaves no room for KV on {tensor_parallel} {name} "
            f"({model.all_weights * weight_bytes / 1e9:.0f} GB of weights)"
        )
    return WorkerProfile(
        name=name if tensor_parallel == 1 else f"{name} x {tensor_parallel}",
        costs=costs,
        kv_tokens=kv_tokens,
        kv_token_bytes=costs.kv_token_bytes,
        layers=model.layers,
        context_length=model.context_length,
        wire_bytes_per_s=gpu.network_bytes_per_s * efficiency.wire * tensor_parallel,
        max_sequences=max_sequences,
        chunk_tokens=chunk_tokens,
        gpus=tensor_parallel,
    )


def read_profile(name: str, model: str = "", *, tensor_parallel: int = 1) -> WorkerProfile:
    """A worker by its accelerator's name, or from a profile's file. Raises ConfigError.

    ``model`` is a name or a path as ``model_shape`` takes it; a file says itself what it was
    measured with.
    """
    if name in ACCELERATORS:
        shape = model_shape(model or DEFAULT_MODEL)
        return gpu_profile(name, shape, tensor_parallel=tensor_parallel)
    path = Path(name)
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        known = ", ".join(ACCELERATORS)
        raise ConfigError(
            f"{name} is neither a profile that can be read ({error}) nor one of {known}"
        ) from error
    if model:
        raise ConfigError(f"{name} was measured with a model: --model-config does not change that")
    return profile_of(fields, path.stem)


def profile_of(fields: Any, name: str) -> WorkerProfile:
    """From what ``profile_fields`` made. Raises ConfigError."""
    if not isinstance(fields, dict) or fields.get("version") != PROFILE_VERSION:
        raise ConfigError(f"{name} is no profile of version {PROFILE_VERSION}")
    try:
        return WorkerProfile(
            name=str(fields.get("name", name)),
            costs=FittedCosts(
                StepCosts(_coefficients(fields["prefill"]), _coefficients(fields["step"]))
            ),
            kv_tokens=int(fields["kv_tokens"]),
            kv_token_bytes=float(fields["kv_token_bytes"]),
            layers=int(fields["layers"]),
            context_length=int(fields["context_length"]),
            wire_bytes_per_s=float(fields["wire_bytes_per_s"]),
            max_sequences=int(fields["max_sequences"]),
            chunk_tokens=int(fields["chunk_tokens"]),
            chunk_keys=int(fields["chunk_keys"]),
            is_cpu=bool(fields["is_cpu"]),
            handoff_s=float(fields["handoff_s"]),
            call_s=float(fields["call_s"]),
            sharing=_sharing(fields.get("sharing", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile {name} lacks a field, or has a wrong one: {error}"
        ) from error


def profile_fields(profile: WorkerProfile) -> dict[str, Any]:
    """What is written of a worker whose costs were fitted."""
    costs = profile.costs.step_costs()
    return {
        "version": PROFILE_VERSION,
        "name": profile.name,
        "prefill": list(costs.prefill),
        "step": list(costs.step),
        "kv_tokens": profile.kv_tokens,
        "kv_token_bytes": profile.kv_token_bytes,
        "layers": profile.layers,
        "context_length": profile.context_length,
        "wire_bytes_per_s": profile.wire_bytes_per_s,
        "max_sequences": profile.max_sequences,
        "chunk_tokens": profile.chunk_tokens,
        "chunk_keys": profile.chunk_keys,
        "is_cpu": profile.is_cpu,
        "handoff_s": profile.handoff_s,
        "call_s": profile.call_s,
        "sharing": asdict(profile.sharing),
    }


def _sharing(fields: dict[str, Any]) -> Sharing:
    found = Sharing(**{name: float(value) for name, value in fields.items()})
    if min(asdict(found).values()) < 1:
        raise ValueError(f"nobody is faster beside others: {fields}")
    return found


def _coefficients(values: Any) -> Coefficients:
    a, b, c = (float(value) for value in values)
    if min(a, b, c) < 0 or max(a, b, c) <= 0:
        raise ValueError(f"coefficients are not negative, and not all 0: {values}")
    return a, b, c
