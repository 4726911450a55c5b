"""One process doing both: prompt and answer on one engine, without a cluster.

The yardstick for the cluster's answers, in tests and benchmarks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.hashing import hash_key
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec
from engine.engine import Engine
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """An answer: its tokens, a stop token included, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] = ()
    """fp32 [hidden_size], where it is wanted."""


def generate(engine: Engine, specs: Iterable[SequenceSpec]) -> list[LocalOutput]:
    """Run all sequences to their ends, batched as the scheduler sees fit.

    A spec of several choices has so many answers, one after another.
    """
    ids = itertools.count()
    first = [make_sequence(engine, next(ids), spec, next_id=lambda: next(ids)) for spec in specs]
    sequences = [each for sequence in first for each in (sequence, *sequence.siblings)]
    found: defaultdict[Sequence, list[TokenLogprobs]] = defaultdict(list)
    for sequence in first:
        compile_grammar(engine, sequence)
        engine.scheduler.add(sequence)
    while plan := engine.scheduler.schedule():
        for update in engine.scheduler.complete(plan, engine.runner.run(plan)):
            found[update.sequence] += update.logprobs
    return [_output(sequence, found[sequence]) for sequence in sequences]


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


def compile_grammar(engine: Engine, sequence: Sequence) -> None:
    """Make a sequence follow its grammar, if it has one. Raises InvalidGrammar.

    Compiles in the caller's thread. In a worker, sequences get their matchers from its gate.
    """
    grammar = sequence.spec.sampling.grammar
    if grammar is not None:
        sequence.follow(engine.grammars.matcher(grammar))


def _output(sequence: Sequence, logprobs: list[TokenLogprobs]) -> LocalOutput:
    if sequence.finish_reason is None:
        raise RuntimeError("the scheduler stopped before the sequence ended")
    answer = sequence.token_ids[sequence.prompt_length :]
    return LocalOutput(
        tuple(answer),
        sequence.finish_reason,
        tuple(logprobs),
        tuple(sequence.prompt_logprobs),
        sequence.embedding,
    )
