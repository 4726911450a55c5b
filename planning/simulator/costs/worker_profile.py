"""Describes a worker's properties, from its accelerator or from a profile that `baton calibrate`
wrote.
"""

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
    """Properties of one worker, in tokens, bytes and seconds."""

    name: str
    costs: StepCostModel
    kv_tokens: int
    """Number of tokens whose KV the worker's pool holds."""
    kv_token_bytes: float
    """Size of the KV of one token, in bytes."""
    layers: int
    context_length: int
    """Maximum tokens of a sequence that the model allows."""
    wire_bytes_per_s: float
    """Bandwidth of KV transfers in each direction."""
    max_sequences: int = 256
    """Maximum sequences in one step."""
    chunk_tokens: int = 8192
    """Maximum tokens in one step."""
    chunk_keys: int = 0
    """Maximum keys of a chunk, see ``engine.scheduling.scheduler.SchedulerLimits``."""
    is_cpu: bool = False
    """Whether the worker makes step plans ahead as workers on CPUs do."""
    handoff_s: float = 0.002
    """Seconds of a handoff without the time of its bytes: the commit and its answer."""
    call_s: float = 0.0005
    """Seconds of one message, one way, between router and worker or between workers."""
    gpus: int = 1
    """Number of GPUs of the worker."""
    sharing: Sharing = ALONE
    """Factors by which other workers on a shared host slow this one."""
    shares_cores: bool = False
    """Whether the worker takes turns on the CPU cores of a shared host, as its record in the
    registry says."""


PROFILE_VERSION = 1
"""Version of the profile's file format. Fields that were added later may be missing. If ``sharing``
or ``shares_cores`` is missing, workers do not share hosts."""
_MEMORY_SHARE = 0.9
"""Fraction of GPU memory that a worker uses: the default of ``gpu_memory_fraction``."""
_ACTIVATION_BYTES = 2e9
"""GPU memory for data other than weights and KV, in bytes."""


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
    """Return the profile of a worker with ``tensor_parallel`` GPUs. Raises ConfigError if the model
    does not fit.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"there is no accelerator {name!r}; known: {', '.join(ACCELERATORS)}")
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
    """Return a worker's profile by its accelerator's name, or from a profile's file. Raises
    ConfigError.

    ``model`` is a name or a path as for ``model_shape``. It is not needed for a profile's file,
    which already contains the model's costs.
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
        raise ConfigError(
            f"{name} was measured with its own model: --model-config cannot change that"
        )
    return profile_of(fields, path.stem)


def profile_of(fields: Any, name: str) -> WorkerProfile:
    """Return the profile from the JSON fields that ``profile_fields`` writes. Raises
    ConfigError."""
    if not isinstance(fields, dict) or fields.get("version") != PROFILE_VERSION:
        raise ConfigError(f"{name} is not a profile of version {PROFILE_VERSION}")
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
            shares_cores=bool(fields.get("shares_cores", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile {name} lacks a field, or has a wrong one: {error}"
        ) from error


def profile_fields(profile: WorkerProfile) -> dict[str, Any]:
    """Return the JSON fields of a worker's profile. Its costs must be of the class
    ``FittedCosts``."""
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
        "shares_cores": profile.shares_cores,
    }


def _sharing(fields: dict[str, Any]) -> Sharing:
    found = Sharing(**{name: float(value) for name, value in fields.items()})
    if min(asdict(found).values()) < 1:
        raise ValueError(f"a worker cannot be faster next to others: {fields}")
    return found


def _coefficients(values: Any) -> Coefficients:
    a, b, c = (float(value) for value in values)
    if min(a, b, c) < 0 or max(a, b, c) <= 0:
        raise ValueError(f"coefficients must not be negative, and not all 0: {values}")
    return a, b, c
