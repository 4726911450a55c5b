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
    """From the strike until every request of that moment had got its next piece or ended. Of a

    standstill, this and the next two are counted from its end."""
    answered_s: float
    """From the strike until a request that came later was answered."""
    whole_s: float
    """From the strike until every worker and router was there; the fault's own time included."""
    leaks: tuple[str, ...]
    drained_blocks: int | None = None
    """KV blocks that others fetched while a worker was drained; None where none was."""

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
    """What was lost or wrong, or ended in an error: one line each."""
    moves: Mapping[str, int] = field(default_factory=dict)
    """How many requests, or choices of them, went on elsewhere, by reason."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """How many prompts were computed by a prefill worker (remote), how many by a decode worker."""

    @property
    def is_clean(self) -> bool:
        """Whether the promise was kept: nothing lost, wrong or leaked, no error with a spare."""
        counts = self.counts
        broken = counts.lost or counts.wrong_tokens or counts.errors_single_fault
        return not broken and not any(one.leaks for one in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The fields of ``Counts``, and those of the faults."""
        struck = [one for one in self.rounds if one.kinds]
        recovery = [one.recovery_s for one in struck]
        whole = [one.whole_s for one in struck]
        return asdict(self.counts) | {
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
        }


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The least value that so many percent do not exceed; None where there are no values."""
    if not values:
        return None
    place = -(-percent * len(values) // 100) - 1
    return round(sorted(values)[place], 3)
