"""`baton profile`: compares prefill and decode steps of one engine with the machine's limits.

It runs the engine alone, without a cluster or network, to separate the cost of steps from that of
serving.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, record_function

from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine, EngineSettings, warm_up
from engine.kv.kv_cache import block_bytes
from engine.roofline import (
    Ceilings,
    Roof,
    Storage,
    Work,
    elapsed,
    measure_ceilings,
    step_work,
    total,
)
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from planning.common.report import whole_table

Say = Callable[[str], None]

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_DECODE_STEPS = 16
_WARM_STEPS = 2
_TRACED_STEPS = 4
_PREFILLS = 3
_GPU_FRACTION = 0.8
_LOWEST_ID = 100
"""Lowest token id in prompts. Lower ids may be control tokens, which come first in a vocabulary."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Settings of a profile: the engine, and the sizes of the measured steps."""

    engine: EngineSettings
    prompt_tokens: int = 1024
    context_tokens: int = 1024
    """Number of cached tokens of each decoding sequence."""
    batches: tuple[int, ...] = (1, 8, 32)
    output: Path | None = None
    """File to which the trace is written, in Chrome's format."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A kind of engine step, or several steps that belong together, with the measured time."""

    name: str
    tokens: int
    roof: Roof


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a profile: all phases, with the measured peak rates of the device."""

    device: str
    dtype: str
    ceilings: Ceilings
    phases: tuple[Phase, ...]


def profile_engine(settings: ProfileSettings, say: Say) -> Profile:
    """Measure the device's peak rates, then each phase. Then run each phase once more for the
    trace.

    Raises ConfigError if the model or the sizes do not fit, or the trace cannot be written.
    """
    _check(settings)
    say("loading the model")
    engine = build_engine(_with_room(settings))
    assert engine.storage is not None, "an engine with weights knows their type"
    bench = _Bench(engine, engine.storage)
    _check_fit(settings, engine)
    warm_up(engine)
    say("measuring memory bandwidth and matrix products")
    ceilings = measure_ceilings(bench.device, _dtype(settings.engine))
    phases = []
    say(f"measuring {_prefill_name(settings.prompt_tokens)}")
    phases.append(_prefill_phase(bench, settings.prompt_tokens, ceilings))
    for batch in settings.batches:
        say(f"measuring {_decode_name(batch, settings.context_tokens)}")
        phases.append(_decode_phase(bench, batch, settings.context_tokens, ceilings))
    if settings.output is not None:
        say(f"tracing into {settings.output}")
        _trace(bench, settings, settings.output)
    return Profile(_device_name(bench.device), settings.engine.dtype, ceilings, tuple(phases))


def draw(profile: Profile) -> Table:
    """Return a table with a row for each measured phase.

    A decode phase has the time of one step, and a prefill phase the time of a whole prompt.
    """
    table = whole_table(
        *("phase", "MB", "GFLOP", "memory floor, ms", "arithmetic floor, ms", "took, ms"),
        *("tokens/s", "MBU", "MFU", "bound by", "over its floor"),
        title=_title(profile),
    )
    for phase in profile.phases:
        roof = phase.roof
        table.add_row(
            phase.name,
            f"{roof.work.bytes / 1e6:.1f}",
            f"{roof.work.operations / 1e9:.2f}",
            f"{roof.memory_s * 1e3:.2f}",
            f"{roof.arithmetic_s * 1e3:.2f}",
            f"{roof.seconds * 1e3:.2f}",
            f"{phase.tokens / roof.seconds:.0f}",
            f"{roof.mbu:.0%}",
            f"{roof.mfu:.0%}",
            roof.bound,
            f"{roof.over_floor:.2f}×",
        )
    return table


class _Bench:
    """An engine that runs step plans made by this class, not by a scheduler. Sequences use the
    first blocks of the cache.
    """

    def __init__(self, engine: Engine, storage: Storage) -> None:
        self.engine = engine
        self.device = engine.runner.device
        self._storage = storage
        self._dice = random.Random(0)  # noqa: S311 - prompts, no secret

    def prefill(self, tokens: int) -> tuple[float, Work]:
        """Prefill one prompt, in chunks as large as the scheduler's. Return the time in seconds,
        and the computed work."""
        (table,) = self._tables(1, tokens)
        steps = self._run_prompt(self._prompts(1, tokens), table, tokens, sample=True)
        self._forget(1)
        return sum(seconds for seconds, _ in steps), total(work for _, work in steps)

    def decode(self, batch: int, context: int, steps: int) -> list[tuple[float, Work]]:
        """Run ``steps`` decode steps. Return the time in seconds and the work of each. Each
        sequence has ``context`` tokens before the first step.
        """
        tables = self._tables(batch, context + steps)
        # One prompt is computed and the others get copies of its blocks, so that a step reads the
        # bytes of all sequences. The last token of each prompt is the first step's.
        with record_function("preparing the cache"):
            new = self._prompts(batch, context + 1)
            self._run_prompt(new, tables[0], context, sample=False)
            for table in tables[1:]:
                for source, target in zip(tables[0], table, strict=True):
                    self.engine.cache.block(target).copy_(self.engine.cache.block(source))
        found = [
            self._run((), [PlanRow(n, at, 1, table, True) for n, table in enumerate(tables)])
            for at in range(context, context + steps)
        ]
        self._forget(batch)
        return found

    def _tables(self, batch: int, tokens: int) -> list[tuple[int, ...]]:
        blocks = _blocks(tokens, self.engine.cache.block_size)
        return [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(batch)]

    def _prompts(self, batch: int, tokens: int) -> tuple[NewSequence, ...]:
        highest = self.engine.config.vocab_size - 1
        lowest = min(_LOWEST_ID, highest)
        return tuple(
            NewSequence(
                number,
                tuple(self._dice.randint(lowest, highest) for _ in range(tokens)),
                tokens,
                _GREEDY,
                (),
            )
            for number in range(batch)
        )

    def _run_prompt(
        self, new: tuple[NewSequence, ...], table: tuple[int, ...], tokens: int, *, sample: bool
    ) -> list[tuple[float, Work]]:
        """Compute ``tokens`` tokens of the first sequence of ``new``. The engine receives all
        sequences of ``new``.
        """
        steps, start = [], 0
        while start < tokens:
            count = min(tokens - start, self.engine.scheduler.limits.max_tokens(start))
            last = start + count == tokens
            steps.append(self._run(new, [PlanRow(0, start, count, table, sample and last)]))
            start, new = start + count, ()
        return steps

    def _run(self, new: tuple[NewSequence, ...], rows: Sequence[PlanRow]) -> tuple[float, Work]:
        plan = StepPlan(0, new, (), tuple(rows))
        seconds = elapsed(self.device, lambda: self.engine.runner.run(plan))
        return seconds, step_work(self.engine.config, self._storage, rows)

    def _forget(self, batch: int) -> None:
        for number in range(batch):
            self.engine.runner.forget(number)


def _dtype(settings: EngineSettings) -> torch.dtype:
    """Return the torch dtype of the engine's settings. The engine has already checked its name."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def _prefill_phase(bench: _Bench, tokens: int, ceilings: Ceilings) -> Phase:
    """Measure the prefill of three prompts, after one that warms up. The result has the median
    time."""
    runs = [bench.prefill(tokens) for _ in range(1 + _PREFILLS)][1:]
    seconds = statistics.median(seconds for seconds, _ in runs)
    return Phase(_prefill_name(tokens), tokens, Roof(runs[0][1], ceilings, seconds))


def _decode_phase(bench: _Bench, batch: int, context: int, ceilings: Ceilings) -> Phase:
    """Measure sixteen decode steps, after two that warm up. The result has the median time."""
    runs = bench.decode(batch, context, _WARM_STEPS + _DECODE_STEPS)[_WARM_STEPS:]
    seconds = statistics.median(seconds for seconds, _ in runs)
    # The context grows by a token each step, so the middle step represents all.
    work = runs[len(runs) // 2][1]
    return Phase(_decode_name(batch, context), batch, Roof(work, ceilings, seconds))


def _prefill_name(tokens: int) -> str:
    return f"prefill of {tokens} tokens"


def _decode_name(batch: int, context: int) -> str:
    return f"decode, batch {batch}, context {context}"


def _trace(bench: _Bench, settings: ProfileSettings, output: Path) -> None:
    activities = [ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        with record_function(_prefill_name(settings.prompt_tokens)):
            bench.prefill(settings.prompt_tokens)
        for batch in settings.batches:
            with record_function(_decode_name(batch, settings.context_tokens)):
                bench.decode(batch, settings.context_tokens, _TRACED_STEPS)
    trace.export_chrome_trace(str(output))


def _check(settings: ProfileSettings) -> None:
    """Check the settings before anything is loaded. Raises ConfigError."""
    if not settings.batches or min(settings.batches) < 1:
        raise ConfigError("the batches to decode are counts of sequences, 1 or more")
    if min(settings.prompt_tokens, settings.context_tokens) < 1:
        raise ConfigError("prompt and context are counts of tokens, 1 or more")
    if settings.output is not None and not settings.output.absolute().parent.is_dir():
        raise ConfigError(f"{settings.output} cannot be written: there is no such folder")


def _check_fit(settings: ProfileSettings, engine: Engine) -> None:
    longest = max(settings.prompt_tokens, settings.context_tokens + _WARM_STEPS + _DECODE_STEPS)
    if longest >= engine.context_length:
        raise ConfigError(
            f"{longest} tokens do not fit the context of {engine.context_length}:"
            " choose a shorter prompt or context"
        )
    needed = _cache_blocks(settings)
    if needed > engine.cache.blocks:
        raise ConfigError(
            f"the cache holds {engine.cache.blocks} blocks and {needed} are needed:"
            " choose smaller batches or a shorter context"
        )


def _with_room(settings: ProfileSettings) -> EngineSettings:
    """Return the engine's settings, changed so that the largest measured batch fits. On a CPU, the
    KV pool gets the size of that batch.

    On a GPU, the engine leaves memory free for the measurement of peak rates.
    """
    engine = settings.engine
    config = load_model_config(engine.model_path)
    size = block_bytes(config, engine.block_size, torch.float32)
    room = _cache_blocks(settings) * size
    return replace(
        engine,
        kv_pool_bytes=room,
        gpu_memory_fraction=min(engine.gpu_memory_fraction, _GPU_FRACTION),
        max_sequences=max(engine.max_sequences, *settings.batches),
    )


def _cache_blocks(settings: ProfileSettings) -> int:
    size = settings.engine.block_size
    decode = settings.context_tokens + _WARM_STEPS + _DECODE_STEPS
    prompt = _blocks(settings.prompt_tokens + 1, size)
    # One more than the longest sequence, so that the pool does not shorten the context.
    return max(max(settings.batches) * _blocks(decode, size), prompt) + 2


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _title(profile: Profile) -> str:
    ceilings = profile.ceilings
    return (
        f"{profile.device}, {profile.dtype}: {ceilings.bytes_per_s / 1e9:.1f} GB/s,"
        f" {ceilings.operations_per_s / 1e9:.0f} GFLOP/s"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
