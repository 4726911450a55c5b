"""An engine: its settings, its parts, and the sequences that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.errors import ConfigError
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
    """What an engine is built from; ``engine.build`` builds it."""

    model_path: Path
    dtype: str = "bfloat16"
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: a GPU where there is one."""
    threads: int = 0
    """Compute threads on the CPU; 0 leaves torch's own choice."""
    block_size: int = 16
    kv_pool_bytes: int = 1 << 30
    """Memory for blocks on the CPU."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory for everything that this engine needs there."""
    chunk_tokens: int = 0
    """Maximum tokens of a step; 0 takes 512 on the CPU and 8192 on a GPU."""
    max_sequences: int = 64
    quantization: str = "auto"
    """As ``engine.model.weights.load_weights`` takes it."""
    hash_block_size: int = 0
    """Tokens of a hash block, of which ``block_size`` is a multiple; 0: as many."""
    kv_dtype: str = "auto"
    """The cache's: ``auto`` for ``dtype``, ``int8``, ``fp8``, or a plain type."""
    lossiest_kv_dtype: str = ""
    """The lossiest type of the caches that exchange KV, by name, for the fingerprint; empty: this
    one's."""
    deterministic: bool = False
    """Whether what cannot keep a row's bits the same in every batch is refused."""
    drafter: str = "none"
    """What guesses tokens: of ``engine.speculation.speculation.DRAFTERS``, or ``auto``: ``ngram``
    on a CPU, and ``none`` on a GPU."""
    divides_context: bool = False
    """Whether several ranks divide the tokens of prompts, and have all weights and KV each; else
    they divide the model."""
    draft_model: Path | None = None
    """The smaller model's folder, for the drafter ``draft``; its weights stay as the files hold
    them. Of ``eagle`` and ``medusa`` the heads' folder."""
    max_model_len: int = 0
    """Maximum tokens of a sequence, which the KV pool must have room for; 0 takes the model's own,
    or as many as there is room for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an engine. The engine core owns pool and scheduler, its thread the runner."""

    config: ModelConfig
    runner: ModelRunner
    pool: BlockPool
    scheduler: Scheduler
    fingerprint: str
    """Of what decides the KV: weights, their quantization, the tokenizer, the lossiest KV type of
    those that share it, a drafter's weights if it has KV too, and, where a row's bits are promised,
    what computes them. Engines with another one share no KV."""
    grammars: CompiledGrammars
    """Those that sequences follow, in the tokens of the model's tokenizer.json."""
    storage: Storage | None = None
    """How its weights and their KV are held; None where there are no weights."""
    quantization: str = ""
    """How most of its weights are held: int8, int4 or fp8; empty: they are not quantized."""

    @property
    def cache(self) -> KvCache:
        return self.runner.cache

    @property
    def context_length(self) -> int:
        return self.scheduler.limits.context_length


def device_of(settings: EngineSettings) -> torch.device:
    """Where it is to compute. Raises ConfigError for what there is not."""
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
        raise ConfigError(
            f"device {name} was asked for, but torch finds {torch.cuda.device_count()} GPUs"
        )
    return device


def drafter_of(settings: EngineSettings, device: torch.device) -> str:
    """What guesses tokens: of ``DRAFTERS``. Raises ConfigError for one that there is not."""
    if settings.drafter == "auto":
        # On a GPU no drafter was measured yet.
        return "ngram" if device.type == "cpu" else "none"
    if settings.drafter not in DRAFTERS:
        known = ", ".join(("auto", *DRAFTERS))
        raise ConfigError(f"drafter {settings.drafter!r} is unknown; known: {known}")
    if device.type != "cpu" and settings.drafter not in TOKEN_DRAFTERS:
        raise ConfigError(
            f"drafter {settings.drafter} runs on CPUs alone; known on a GPU: auto,"
            f" {', '.join(TOKEN_DRAFTERS)}"
        )
    return settings.drafter


def chunk_tokens(settings: EngineSettings, device: torch.device, ranks: int = 1) -> int:
    """Maximum tokens of a step; ``ranks`` divide the tokens of prompts."""
    return settings.chunk_tokens or _CHUNK_TOKENS[device.type] * ranks


def max_rows(settings: EngineSettings, device: torch.device) -> int:
    """Maximum rows of a step of sequences that decode: a token of a draft is a row of its own."""
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
    """A sequence for this engine: its stop tokens and its hash key come from the model.

    The rest is as ``Sequence`` takes it. ``next_id`` gives the siblings' ids where the spec has
    several choices; without it the first one alone is made.
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
    """Run a prefill and a decode step, so that the first request does not pay for first uses."""
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
