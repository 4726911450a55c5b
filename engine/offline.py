"""Runs offline inference: prompts and answers on one engine, without a cluster.

Tests and benchmarks use it as the reference for the cluster's answers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec
from engine.engine import Engine, make_sequence
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class OfflineOutput:
    """One answer of offline inference: its tokens, including a stop token, and its finish
    reason."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] = ()
    """Embedding of the prompt, fp32 [hidden_size]; empty unless the spec wants one."""


def generate(engine: Engine, specs: Iterable[SequenceSpec]) -> list[OfflineOutput]:
    """Generate the answers to all specs, batched by the scheduler.

    A spec with several choices has one answer for each choice, one after another.
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


def compile_grammar(engine: Engine, sequence: Sequence) -> None:
    """Compile a sequence's grammar, if it has one, and attach it. Raises InvalidGrammar.

    The grammar is compiled on the caller's thread. In a worker, this is done before the sequence is
    queued.
    """
    grammar = sequence.spec.sampling.grammar
    if grammar is not None:
        sequence.follow(engine.grammars.matcher(grammar, sequence.spec.cache_salt))


def _output(sequence: Sequence, logprobs: list[TokenLogprobs]) -> OfflineOutput:
    if sequence.finish_reason is None:
        raise RuntimeError("the scheduler stopped before the sequence ended")
    answer = sequence.token_ids[sequence.prompt_length :]
    return OfflineOutput(
        tuple(answer),
        sequence.finish_reason,
        tuple(logprobs),
        tuple(sequence.prompt_logprobs),
        sequence.embedding,
    )
