"""What a client has got of an answer, and whether that is right. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ChoiceSoFar:
    """One choice of an answer while it comes."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    """Names and arguments of tool calls, in order; their ids are random each time."""
    finish_reason: str = ""
    """Empty until the choice has ended."""


@dataclass(slots=True)
class AnswerSoFar:
    """An answer while it comes; owned by the call that reads it."""

    choices: list[ChoiceSoFar]
    fingerprint: str = field(default="", compare=False)
    """The fingerprint that the answer names; empty until it has."""

    @classmethod
    def empty(cls, choices: int) -> AnswerSoFar:
        """An empty answer with this number of choices."""
        return cls([ChoiceSoFar() for _ in range(choices)])

    @property
    def token_count(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def is_whole(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason for choice in self.choices)

    def is_beginning_of(self, other: AnswerSoFar) -> bool:
        """Whether all that has come is how ``other`` begins."""
        return all(
            mine.tokens == theirs.tokens[: len(mine.tokens)]
            and theirs.text.startswith(mine.text)
            and theirs.calls.startswith(mine.calls)
            for mine, theirs in zip(self.choices, other.choices, strict=True)
        )
