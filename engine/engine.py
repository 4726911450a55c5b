"""An engine: its settings, its parts, and the sequences that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.errors import ConfigError
from baton.grammar import TokenMatcher
from baton.grammars.compiled_grammars import CompiledGrammars
from baton.hashing import hash_key
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.checkpoint.model_config import ModelConfig
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import KvCache
from engine.roofline import Storage
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.speculation.length import MAX_IN_A_STEP
from engine.speculation.speculation import DRAFTERS, TOKEN_DRAFTERS

_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings from which ``engine.build`` builds an engine."""

    model_path: Path
    dtype: str = "bfloat16"
    device: str = "auto"
    """Device to compute on: ``cpu``, ``cuda``, ``cuda:1``, or ``auto``, which selects a GPU if
    there is one."""
    threads: int = 0
    """Number of CPU threads that compute; 0 means torch's default."""
    block_size: int = 16
    kv_pool_bytes: int = 1 << 30
    """Memory for KV blocks on the CPU, in bytes. On a GPU, ``gpu_memory_fraction`` determines the
    pool's size instead."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory that this engine may use for weights, KV blocks and steps
    together."""
    chunk_tokens: int = 0
    """Maximum tokens of a step; 0 means 512 on the CPU, and 8192 on a GPU."""
    max_sequences: int = 64
    quantization: str = "auto"
    """Quantization of the weights: an option of ``engine.model.weights.load_weights``."""
    hash_block_size: int = 0
    """Number of tokens in a hash block, a divisor of ``block_size``; 0 means ``block_size``."""
    kv_dtype: str = "auto"
    """Type of the KV in the cache: ``int8``, ``fp8``, a plain type, or ``auto``, which is the
    model's ``dtype``."""
    lossiest_kv_dtype: str = ""
    """KV type with the largest loss among all caches that exchange KV. It is part of the
    fingerprint. Empty means this cache's type."""
    deterministic: bool = False
    """Whether results must be deterministic. A setup in which a row's bits depend on its batch is
    then rejected."""
    drafter: str = "none"
    """The speculative method: one of ``engine.speculation.speculation.DRAFTERS``, or ``auto``,
    which is ``ngram`` on a CPU and ``none`` on a GPU."""
    divides_context: bool = False
    """Whether several ranks divide the tokens of prompts (context parallelism). Each then has all
    weights and KV. Otherwise the ranks divide the model (tensor parallelism)."""
    draft_model: Path | None = None
    """Folder of the draft model for the drafter ``draft``, or of the heads for ``eagle`` and
    ``medusa``. A draft model's weights keep the type of the files."""
    max_model_len: int = 0
    """Maximum tokens of a sequence; the KV pool must have room for one such sequence. 0 means the
    model's own limit, or the number of tokens that fit the pool if that is smaller."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an engine. The engine core owns the pool and the scheduler; its thread owns the
    runner."""

    config: ModelConfig
    runner: ModelRunner
    pool: BlockPool
    scheduler: Scheduler
    fingerprint: str
    """Hash of everything that determines the KV: weights, their quantization, the tokenizer, the
    lossiest KV type of the workers that share it, and a drafter's weights if it has KV. In
    deterministic mode, it also covers the hardware and software that compute the KV. Engines with
    different fingerprints share no KV."""
    grammars: CompiledGrammars[TokenMatcher]
    """Compiles and keeps grammars for the tokens of the model's tokenizer.json."""
    storage: Storage | None = None
    """Number of bytes per weight, and per token of KV; None if there are no weights."""
    quantization: str = ""
    """Quantization of most of the weights: int8, int4 or fp8; empty if they are not quantized."""

    @property
    def cache(self) -> KvCache:
        return self.runner.cache

    @property
    def context_length(self) -> int:
        return self.scheduler.limits.context_length


def device_of(settings: EngineSettings) -> torch.device:
    """Choose the device to compute on. Raises ConfigError if it does not exist."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in _CHUNK_TOKENS:
        raise ConfigError(f"device {name!r} is unknown; known: auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name}, but torch finds {torch.cuda.device_count()} GPUs")
    return device


def drafter_of(settings: EngineSettings, device: torch.device) -> str:
    """Choose the speculative method, one of ``DRAFTERS``. Raises ConfigError for an unknown or
    unsupported one."""
    if settings.drafter == "auto":
        # On a GPU no drafter was measured yet.
        return "ngram" if device.type == "cpu" else "none"
    if settings.drafter not in DRAFTERS:
        known = ", ".join(("auto", *DRAFTERS))
        raise ConfigError(f"drafter {settings.drafter!r} is unknown; known: {known}")
    if device.type != "cpu" and settings.drafter not in TOKEN_DRAFTERS:
        raise ConfigError(
            f"drafter {settings.drafter} runs only on CPUs; known on a GPU: auto,"
            f" {', '.join(TOKEN_DRAFTERS)}"
        )
    return settings.drafter


def chunk_tokens(settings: EngineSettings, device: torch.device, ranks: int = 1) -> int:
    """Compute the maximum tokens of a step; ``ranks`` is the number of ranks that divide
    prompts."""
    return settings.chunk_tokens or _CHUNK_TOKENS[device.type] * ranks


def max_rows(settings: EngineSettings, device: torch.device) -> int:
    """Compute the maximum rows of a decode step, in which each draft token is a row of its own."""
    drafted = MAX_IN_A_STEP if drafter_of(settings, device) != "none" else 0
    return settings.max_sequences + drafted


def make_sequence(
    engine: Engine,
    sequence_id: int,
    spec: SequenceSpec,
    *,
    prefill_only: bool = False,
    queued_at: float = 0.0,
    deadline: float = math.inf,
    next_id: Callable[[], int] | None = None,
) -> Sequence:
    """Make a sequence for this engine: its stop tokens and its hash key come from the model.

    The other arguments are those of ``Sequence``. If the spec has several choices, ``next_id``
    returns a sequence id for each further choice; without it, only the first choice is made.
    """
    sampling = spec.sampling
    eos = engine.config.eos_ids if sampling.ends_at_eos else ()
    stop_ids = tuple(sorted({*eos, *sampling.stop_token_ids}))
    key = hash_key(engine.fingerprint, spec.cache_salt)

    def made(number: int, choice: int, queued_at: float = 0.0) -> Sequence:
        return Sequence(
            number,
            spec,
            stop_ids=stop_ids,
            hash_key=key,
            prefill_only=prefill_only,
            queued_at=queued_at,
            deadline=deadline,
            choice=choice,
        )

    sequence = made(sequence_id, spec.choice, queued_at)
    if next_id is not None:
        others = range(spec.choice + 1, spec.choice + spec.choices)
        sequence.siblings = tuple(made(next_id(), choice) for choice in others)
    return sequence


def warm_up(engine: Engine) -> None:
    """Run a prefill and a decode step, so that the first request does not wait for initialization.
    On a GPU, also capture decode steps."""
    size = engine.cache.block_size
    count = min(engine.context_length - 1, engine.scheduler.limits.chunk_tokens, 64)
    table = tuple(range(-(-(count + 1) // size)))
    new = NewSequence(0, (0,) * count, count, SamplingParams(temperature=0.0), ())
    engine.runner.run(StepPlan(0, (new,), (), (PlanRow(0, 0, count, table, True),)))
    engine.runner.run(StepPlan(0, (), (), (PlanRow(0, count, 1, table, True),)))
    engine.runner.forget(0)
    if engine.cache.data.device.type == "cuda":
        from engine.gpu.runner import GpuRunner  # noqa: PLC0415

        assert isinstance(engine.runner, GpuRunner), "every GPU has one"
        engine.runner.capture()
