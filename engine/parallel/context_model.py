"""A step of a context-parallel worker: its tokens lie on the ranks, each of which has all weights.

a long step ─every rank computes its tokens, and spreads their KV layer by layer→ rank 0 draws
a short step ─rank 0 computes it alone, and its KV is copied to the others→ rank 0 draws
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from engine.kv.kv_cache import KvGroup
from engine.parallel.context_exchange import ContextExchange
from engine.parallel.context_split import ContextShare, is_split, shares_of
from engine.step.step import StepInput, StepModel, StepOutput

Compute: TypeAlias = Callable[[StepInput], StepOutput]
"""Computes tokens on this rank, and calls ``ContextExchange.spread`` of each layer."""

_NOTHING = StepOutput([], None)


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one rank computes of a step."""

    step: StepInput
    tokens: tuple[int, ...] = ()
    """Which tokens of the whole step these are; none of a step that is not divided."""
    outputs: tuple[int, ...] = ()
    """Which outputs of the whole step its outputs are."""
    gathers: bool = False
    """Whether rank 0 lacks some outputs. Usually these are last tokens of rows, which it has."""


class ContextSteps:
    """One rank's steps; all ranks are given the same ones. Used by the engine thread."""

    def __init__(self, cache: KvGroup, exchange: ContextExchange) -> None:
        self._cache = cache
        self._exchange = exchange
        self.group = exchange.group

    @contextmanager
    def part(self, step: StepInput) -> Iterator[StepPart | None]:
        """What this rank is to compute meanwhile; None: nothing. Behind it all ranks have the KV.

        Raises WorkerFailed where one of them is lost.
        """
        group = self.group
        if is_split(step.rows, group.ranks):
            shares = shares_of(step.rows, group.ranks)
            self._exchange.begin(step.rows, shares, self._cache)
            try:
                yield _part(step, shares[group.rank], shares[0])
            finally:
                self._exchange.end()
            return
        yield None if group.rank else StepPart(step)
        self._exchange.copy_from_lead(step.rows, self._cache)

    def run(self, step: StepInput, compute: Compute) -> StepOutput:
        """Compute a step. Rank 0 alone has what comes out of it."""
        with self.part(step) as part:
            found = _NOTHING if part is None else compute(part.step)
        return found if part is None or not part.tokens else self._whole(step, part, found)

    def _whole(self, step: StepInput, part: StepPart, found: StepOutput) -> StepOutput:
        """What the ranks have found together."""
        if found.hidden is not None:
            hidden = self._exchange.whole(found.hidden, part.tokens, len(step.token_ids))
            found = replace(found, hidden=hidden)
        if not part.gathers:
            return found
        assert found.logits is not None, "such a part is not greedy"
        logits = self._exchange.whole(found.logits, part.outputs, len(step.outputs))
        if step.greedy:
            return replace(found, best=logits.argmax(dim=-1).tolist(), logits=None)
        return replace(found, logits=logits)


def _part(step: StepInput, own: ContextShare, lead: ContextShare) -> StepPart:
    here = {token: place for place, token in enumerate(own.tokens)}
    leads = set(lead.tokens)
    gathers = any(token not in leads for token in step.outputs)
    outputs = tuple(number for number, token in enumerate(step.outputs) if token in here)
    mine = StepInput(
        own.rows,
        [step.token_ids[token] for token in own.tokens],
        [here[step.outputs[number]] for number in outputs],
        step.greedy and not gathers,
        step.hidden_layers,
    )
    return StepPart(mine, own.tokens, outputs, gathers)


class ContextModel:
    """One rank's ``engine.step.step.StepModel``, of one that computes on this rank alone."""

    def __init__(self, model: StepModel, steps: ContextSteps) -> None:
        self._model = model
        self._steps = steps

    @property
    def layers_done(self) -> int:
        """Of rank 0: all tokens' KV is in its cache when it has computed a layer."""
        return self._model.layers_done

    def clear_progress(self) -> None:
        self._model.clear_progress()

    def use_threads(self, threads: int) -> None:
        self._model.use_threads(threads)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens, on all ranks. Raises WorkerFailed where one of them is lost."""
        return self._steps.run(step, self._model.run)
