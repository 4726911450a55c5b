"""What a step asks of a model, whatever computes it: torch, the CPU's C++ or the GPU's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.scheduling.plan import PlanRow


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens of one step, all sequences after one another."""

    rows: tuple[PlanRow, ...]
    token_ids: list[int]
    """[tokens]: of every row its ``count`` tokens."""
    outputs: list[int]
    """Which of the tokens' logits are wanted."""
    greedy: bool
    """Whether their likeliest tokens are all that is wanted."""
    hidden_layers: tuple[int, ...] = ()
    """Of which layers what goes into them is wanted, of every token, for a drafter: 0 is the first
    layer, whose input are the embeddings; the number of layers stands for what comes out of the
    last one, before the last norm."""
    features: torch.Tensor | None = None
    """fp32 [tokens, hidden_size]: what an EAGLE head takes beside the tokens."""
    states: torch.Tensor | None = None
    """fp32 [tokens, layers, hidden_size], in place of ``features``: what went into the target's
    layers, which the head makes them of."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Of the first two one: ``best`` for a greedy step, else ``logits``."""

    best: list[int] | None
    """The likeliest token of each output; of equals the lowest."""
    logits: torch.Tensor | None
    """fp32 [outputs, vocab_size]; it may be overwritten by the next step."""
    hidden: torch.Tensor | None = None
    """fp32 [tokens, hidden_layers, hidden_size], in the order of ``StepInput.hidden_layers``; None
    where none are wanted. It may be overwritten by the next step."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """How an engine shares its host's cores with others: see engine/cpu/board.h."""

    lines: int
    """Address of the board; it stays mapped as long as the decoder runs."""
    count: int
    mine: int
    cores: int
    yields: bool
    """Whether this engine's helpers leave when others are more urgent."""


class StepModel(Protocol):
    """A decoder over a KV cache. Called by the engine thread alone."""

    @property
    def layers_done(self) -> int:
        """Layers that have stored the KV of all tokens of the step that runs; any thread may ask.

        0 where that is not known before the step's end.
        """

    def clear_progress(self) -> None:
        """Before a step: none of its layers is done."""

    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens, and store their KV."""

    def use_threads(self, threads: int) -> None:
        """Take this many threads of the CPU from the next step on."""
