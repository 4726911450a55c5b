"""Which tests may skip: expected_skips.toml lists the reasons, with the number of tests each.

With ``--expect-skips RUN`` pytest fails where a test skips for another reason, or where more
do than the run expects. Fewer skip where what the reason says is missing is there, or comes while
tests run.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import pytest

TABLE = Path(__file__).parents[1] / "expected_skips.toml"


def read_expected(run: str, table: Path = TABLE) -> dict[str, int]:
    """The number of skips of a run by the beginning of their reason.

    Raises KeyError for a run that the table does not have.
    """
    found: dict[str, int] = tomllib.loads(table.read_text())[run]
    return found


def reason_of(report: pytest.TestReport) -> str:
    """Why a test, or a module, was skipped."""
    _, _, reason = cast(tuple[str, int, str], report.longrepr)
    return reason.removeprefix("Skipped: ")


def wrong_skips(reasons: Iterable[str], expected: Mapping[str, int]) -> list[str]:
    """What differs from the expected skips, in words; empty where nothing does."""
    counts: Counter[str] = Counter()
    wrong = []
    for reason in reasons:
        begin = next((one for one in expected if reason.startswith(one)), None)
        if begin is None:
            wrong.append(f"no test may skip because: {reason}")
        else:
            counts[begin] += 1
    wrong += [
        f"{count} tests skip because: {begin}; expected are at most {expected[begin]}"
        for begin, count in counts.items()
        if count > expected[begin]
    ]
    return wrong
