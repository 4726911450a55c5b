"""What clients call the agent and the run of a request."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.inference.labels import Labels


def test_metadata_takes_precedence_over_headers() -> None:
    labels = Labels.of_headers({"x-baton-agent": "writer", "x-baton-run-id": "r1"})
    assert labels == Labels("writer", "r1")
    assert labels.or_of_body({"metadata": {"agent": "critic"}}) == Labels("critic", "r1")
    assert labels.or_of_body({"metadata": {"color": "red"}}) == labels
    assert labels.or_of_body({}) == labels


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("writer", "must be an object"),
        ({"agent": 5}, "at most 64 printable characters"),
        ({"agent": "x" * 65}, "at most 64 printable characters"),
        ({"agent": "a\nb"}, "printable"),
        ({"agent": "\ud800"}, "printable"),
        ({"agent": "(other)"}, "parenthesis"),
        ({"run_id": "x" * 129}, "at most 128 printable characters"),
    ],
)
def test_names_are_bounded(metadata: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Labels().or_of_body({"metadata": metadata})
