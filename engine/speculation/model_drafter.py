"""What guesses tokens with a model of its own, for all sequences of a step at once.

Each step goes in this order, all of it on the engine thread:

    backlog, catch_up, propose → begin → (the model computes the step) → computed

A drafter may have a group of the KV cache (``KvCache.drafter``), of the same block tables as the
model's: it fills it for the tokens that the model has computed, at once or when it needs it, and
says with ``engine.speculation.model.filled_slots`` how far it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.scheduling.known_sequence import KnownSequence
from engine.scheduling.plan import PlanRow
from engine.step.step import CoreShare


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A sequence that decodes in a step, and how many tokens behind its last one are wanted."""

    row: PlanRow
    """As it is computed without a draft: the sequence's last token."""
    known: KnownSequence
    most: int
    """1 or more; its block table has slots for them."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that the model has computed."""

    row: PlanRow
    """With the drafted tokens in it."""
    known: KnownSequence
    """With the tokens that the step has brought, behind those of the row."""
    right: int
    """So many of the row's tokens, from its first, are the sequence's: all but wrong drafts."""
    drafted: int
    """So many of the row's tokens, to its last, are those of a draft."""
    first: int
    """Which of the step's tokens the row's first one is: its place in ``StepOutput.hidden``."""


class ModelDrafter(Protocol):
    """One for an engine; see the module's text."""

    @property
    def name(self) -> str:
        """As the configuration and the metrics call it."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What ``computed`` wants of the model; see ``StepInput.hidden_layers``."""

    @property
    def max_tokens(self) -> int:
        """The longest draft that it makes."""

    def backlog(self, query: DraftQuery) -> int | None:
        """How many tokens it must take in before it can draft for a sequence, the last one aside.

        None where it cannot draft for it, now or ever.
        """

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Take in up to ``most`` tokens of the backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Of each up to ``most`` tokens, the backlog being taken in first."""

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """The model computes these rows next, drafted tokens included."""

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """The model has computed a step. ``hidden`` is of ``hidden_layers``.

        ``prompts``: whether to take in at once what was computed of prompts; other tokens may wait
        for the next draft. Returns how many tokens were taken in so.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; one that is not known is ignored."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, where its model can."""
