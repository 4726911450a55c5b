"""A step of a context-parallel worker: its tokens lie on the ranks, each of which has all weights.

a long step ─every rank computes its tokens, and spreads their KV layer by layer→ rank 0 draws
a short step ─rank 0 computes it alone, and its KV is copied to the others→ rank 0 draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kv_cache import KvGroup
from engine.parallel.context_exchange import ContextExchange
from engine.parallel.context_split import ContextShare, is_split, shares_of
from engine.step import StepInput, StepModel, StepOutput

_NOTHING = StepOutput([], None)


class ContextModel:
    """One rank's ``engine.step.StepModel``; all ranks are given the same steps.

    Rank 0 alone has what comes out of a step.
    """

    def __init__(self, model: StepModel, cache: KvGroup, exchange: ContextExchange) -> None:
        """``model`` computes on this rank, and calls ``exchange.spread`` of each layer."""
        self._model = model
        self._cache = cache
        self._exchange = exchange

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
        group = self._exchange.group
        if is_split(step.rows, group.ranks):
            return self._run_split(step, shares_of(step.rows, group.ranks))
        found = _NOTHING if group.rank else self._model.run(step)
        self._exchange.copy_from_lead(step.rows, self._cache)
        return found

    def _run_split(self, step: StepInput, shares: Sequence[ContextShare]) -> StepOutput:
        group, device = self._exchange.group, self._cache.data.device
        own = shares[group.rank]
        here = {token: place for place, token in enumerate(own.tokens)}
        # Usually rank 0 has all that is asked for: the last token of each row.
        leads = set(shares[0].tokens)
        gathers = any(token not in leads for token in step.outputs)
        outputs = [place for place, token in enumerate(step.outputs) if token in here]
        mine = StepInput(
            own.rows,
            [step.token_ids[token] for token in own.tokens],
            [here[step.outputs[place]] for place in outputs],
            step.greedy and not gathers,
            step.hidden_layers,
        )
        self._exchange.begin(step.rows, shares, self._cache)
        try:
            found = self._model.run(mine)
        finally:
            self._exchange.end()
        if found.hidden is not None:
            tokens = torch.tensor(own.tokens, device=device)
            count = len(step.token_ids)
            found = replace(found, hidden=self._exchange.whole(found.hidden, tokens, count))
        if gathers:
            assert found.logits is not None, "the step is not greedy"
            places = torch.tensor(outputs, dtype=torch.int64, device=device)
            logits = self._exchange.whole(found.logits, places, len(step.outputs))
            found = replace(found, logits=logits)
        if gathers and step.greedy:
            assert found.logits is not None, "they were gathered"
            return replace(found, best=found.logits.argmax(dim=-1).tolist(), logits=None)
        return found
