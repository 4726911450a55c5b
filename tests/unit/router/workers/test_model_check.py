"""A router uses no workers of a model with another name or tokenizer."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest

from baton.store.registry import WorkerRecord
from router.workers.model_check import ModelCheck, commit_of
from tests.support.router.workers import record

OLD, NEW = "a" * 40, "b" * 40


def workers(*commits: str) -> dict[str, WorkerRecord]:
    slots = {f"d-{number}": commit for number, commit in enumerate(commits)}
    return {slot: replace(record(slot), revision=commit) for slot, commit in slots.items()}


@pytest.mark.parametrize("revision", ["", "main", "refs/pr/1", OLD])
def test_the_workers_commit_is_taken(revision: str) -> None:
    assert commit_of(workers(OLD, OLD).values(), revision) == OLD


@pytest.mark.parametrize("revision", ["", "main", OLD])
def test_without_workers_of_the_hub_the_configuration_holds(revision: str) -> None:
    assert commit_of([], revision) == revision
    assert commit_of(workers("").values(), revision) == revision


def test_during_a_rollout_the_commit_of_most_workers_is_taken() -> None:
    assert commit_of(workers(OLD, NEW, NEW).values(), "main") == NEW
    assert commit_of(workers(OLD, NEW, NEW).values(), OLD) == OLD, "a commit that was asked for"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "other"}, ("'other'", "'tiny'")),
        ({"tokenizer": "u"}, ("tokenizer or chat template is u", "the router has t")),
    ],
)
def test_workers_of_another_model_are_left_out(
    changes: dict[str, str], told: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    check = ModelCheck("tiny", "t")
    other = replace(record("d-1"), **cast(Any, changes))
    listed = {"d-0": replace(record("d-0"), tokenizer="t"), "d-1": other, "d-2": record("d-2")}
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert set(check.alike(listed)) == {"d-0", "d-2"}
    assert check.refused == {"d-1"}
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert all(text in message for text in ("d-1", *told, "Start routers with"))


def test_other_weights_are_no_other_model() -> None:
    listed = workers(OLD, NEW)
    listed["d-0"] = replace(listed["d-0"], fingerprint="another", quantization="int8")
    assert ModelCheck("tiny", "t").alike(listed) == listed
