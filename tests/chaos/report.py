"""The figures of a run, as they go into its JSON file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.load.ledger import Counts


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did."""

    kinds: tuple[str, ...]
    """None where something was found before the first fault."""
    victims: tuple[str, ...]
    streams: int
    """That ran on the victims when they were struck."""
    seconds: float
    """How long the fault lasted."""
    streams_s: float
    """From the fault until every request of that moment had received its next piece or ended. For a
    standstill, this and the next two are counted from its end."""
    answered_s: float
    """From the strike until a request that came later was answered."""
    whole_s: float
    """From the strike until every worker and router was there; the fault's own time included."""
    leaks: tuple[str, ...]
    drained_blocks: int | None = None
    """KV blocks that others fetched while a worker was drained; None where none was."""
    takeover_s: float | None = None
    """From the moment when a launcher could lead until another supervisor's term had begun: from
    the strike where one waited, else from the end of the fault. None for other faults."""

    @property
    def recovery_s(self) -> float:
        """From the strike until clients feel nothing any more."""
        return max(self.streams_s, self.answered_s)


@dataclass(frozen=True, slots=True)
class Report:
    """``skipped``: why a kind of fault could not be made here, by its name."""

    seed: int
    minutes: float
    counts: Counts
    rounds: tuple[RoundReport, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    """What was lost or wrong, ended in an error, or was reset by nothing: one line each."""
    min_rounds: int = 1
    """Fewer rounds of faults are too few."""
    min_kinds: int = 1
    """Fewer kinds of faults are too few."""
    moves: Mapping[str, int] = field(default_factory=dict)
    """How many requests, or choices of them, went on elsewhere, by reason."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """How many prompts were computed by a prefill worker (remote), how many by a decode worker."""
    left: tuple[str, ...] = ()
    """Workers and supervisors that outlived the cluster, one line each."""

    @property
    def complaints(self) -> list[str]:
        """Why the run has failed; empty where the promise was kept and the run had enough faults.

        The promise: nothing lost, wrong or leaked, no error with a spare, no connection reset that
        no fault explains.
        """
        counts, struck = self.counts, self._struck
        kinds = {kind for one in struck for kind in one.kinds}
        idle = sum(not one.streams for one in struck)
        told = (
            (counts.lost, "requests lost"),
            (counts.wrong_tokens, "wrong answers"),
            (counts.errors_single_fault, "errors with one fault or none"),
            (counts.resets_unexplained, "connections reset, and no router ended"),
            (counts.requests - counts.finished - counts.errors - counts.lost, "not counted"),
            (sum(len(one.leaks) for one in self.rounds), "leaks"),
            (idle, "rounds whose victims had nothing to do"),
            (len(self.left), "workers or supervisors that outlived the cluster"),
        )
        found = [f"{count} {what}" for count, what in told if count]
        found += [f"not made: {name}: {why}" for name, why in self.skipped.items()]
        if not counts.finished:
            found.append("no request finished")
        if len(struck) < self.min_rounds:
            found.append(f"{len(struck)} rounds, expected {self.min_rounds}")
        if len(kinds) < self.min_kinds:
            found.append(f"{len(kinds)} kinds of faults, expected {self.min_kinds}")
        return found

    @property
    def _struck(self) -> list[RoundReport]:
        return [one for one in self.rounds if one.kinds]

    def to_json(self) -> dict[str, Any]:
        """The fields of ``Counts``, and those of the faults."""
        struck = self._struck
        recovery = [one.recovery_s for one in struck]
        whole = [one.whole_s for one in struck]
        return asdict(self.counts) | {
            "complaints": self.complaints,
            "leaks": sum(len(one.leaks) for one in self.rounds),
            "faults": dict(sorted(Counter(k for one in self.rounds for k in one.kinds).items())),
            "recovery_s_p50": _percentile(recovery, 50),
            "recovery_s_p99": _percentile(recovery, 99),
            "whole_s_p50": _percentile(whole, 50),
            "whole_s_p99": _percentile(whole, 99),
            "moves": dict(self.moves),
            "route_decisions": dict(self.decisions),
            "drained_blocks": [
                one.drained_blocks for one in self.rounds if one.drained_blocks is not None
            ],
            "seed": self.seed,
            "minutes": self.minutes,
            "skipped": self.skipped,
            "rounds": [asdict(one) for one in self.rounds],
            "notes": list(self.notes),
            "left": list(self.left),
        }


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The least value that this percentage does not exceed; None without values."""
    if not values:
        return None
    place = -(-percent * len(values) // 100) - 1
    return round(sorted(values)[place], 3)
