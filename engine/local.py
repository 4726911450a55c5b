"""One process doing both: prompt and answer on one engine, without a cluster.

The yardstick for the cluster's answers, in tests and benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.hashing import hash_key
from baton.request import FinishReason, SequenceSpec
from engine.engine import Engine
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """An answer: its tokens, a stop token included, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def generate(engine: Engine, specs: Iterable[SequenceSpec]) -> list[LocalOutput]:
    """Run all sequences to their ends, batched as the scheduler sees fit."""
    sequences = [make_sequence(engine, number, spec) for number, spec in enumerate(specs)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while plan := engine.scheduler.schedule():
        engine.scheduler.complete(plan, engine.runner.run(plan))
    return [_output(sequence) for sequence in sequences]


def make_sequence(
    engine: Engine,
    sequence_id: int,
    spec: SequenceSpec,
    *,
    prefill_only: bool = False,
    queued_at: float = 0.0,
    deadline: float = math.inf,
) -> Sequence:
    """A sequence for this engine: its stop tokens and its hash key come from the model.

    The rest is as ``Sequence`` takes it.
    """
    sampling = spec.sampling
    eos = engine.config.eos_ids if sampling.ends_at_eos else ()
    return Sequence(
        sequence_id,
        spec,
        stop_ids=tuple(sorted({*eos, *sampling.stop_token_ids})),
        hash_key=hash_key(engine.fingerprint, spec.cache_salt),
        prefill_only=prefill_only,
        queued_at=queued_at,
        deadline=deadline,
    )


def _output(sequence: Sequence) -> LocalOutput:
    if sequence.finish_reason is None:
        raise RuntimeError("the scheduler stopped before the sequence ended")
    answer = sequence.token_ids[sequence.prompt_length :]
    return LocalOutput(tuple(answer), sequence.finish_reason)
