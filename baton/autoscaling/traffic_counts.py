"""What came to a router and what became of it, in plain numbers: the autoscaler's evidence.

Plain Python, no I/O, no clock. A router's event loop owns the one that it counts in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self

TIGHT_SHARE = 0.5
"""An SLO of which a request has used more than this share was tight."""


@dataclass(slots=True)
class TrafficCounts:
    """Since a router began; or what has been added between two looks."""

    requests: float = 0.0
    """That have come, those that were refused too."""
    input_tokens: float = 0.0
    """Tokens of their prompts."""
    expected_tokens: float = 0.0
    """Tokens that their answers are expected to have, whether they were refused or not."""
    shed: float = 0.0
    """Requests that were refused for want of room or time."""
    first_tokens: float = 0.0
    """Requests that have their first token."""
    late_first_tokens: float = 0.0
    """Of these, later than their SLO."""
    tight_first_tokens: float = 0.0
    """Of these, later than ``TIGHT_SHARE`` of it; the late ones too."""
    answers: float = 0.0
    """Answers of two tokens or more that have ended well."""
    slow_answers: float = 0.0
    """Of these, with more time per token than the SLO."""
    tight_answers: float = 0.0
    """Of these, with more than ``TIGHT_SHARE`` of it; the slow ones too."""
    prefilled_tokens: float = 0.0
    """Tokens of the prompts that prefill workers have done, those from their caches too."""
    prefill_s: float = 0.0
    """Seconds of their engines that it took."""

    def judge_first_token(self, ttft_s: float, slo_s: float) -> None:
        """A request has its first token."""
        self.first_tokens += 1
        self.late_first_tokens += ttft_s > slo_s
        self.tight_first_tokens += ttft_s > TIGHT_SHARE * slo_s

    def judge_answer(self, tpot_s: float, slo_s: float) -> None:
        """An answer of two tokens or more has ended well."""
        self.answers += 1
        self.slow_answers += tpot_s > slo_s
        self.tight_answers += tpot_s > TIGHT_SHARE * slo_s

    def since(self, earlier: Self) -> Self:
        """What has been added."""
        return type(self)(**{name: getattr(self, name) - getattr(earlier, name) for name in NAMES})

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """The sum of all."""
        whole = cls()
        for part in parts:
            for name in NAMES:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole

    @classmethod
    def parse(cls, told: Mapping[str, object]) -> Self:
        """From what ``dataclasses.asdict`` gave. Raises ValueError, TypeError."""
        return cls(**{name: float(told[name]) for name in NAMES if name in told})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ToldTraffic:
    """What one life of a router process tells."""

    beat: int
    """Grows with every time that it tells: one that tells no more is known by it."""
    counts: TrafficCounts


NAMES = tuple(field.name for field in fields(TrafficCounts))
