"""A router uses no workers of another commit of the model."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.store.registry import WorkerRecord
from router.workers.model_commit import CommitCheck, commit_of
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


def test_another_commit_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"serve commit {OLD} .* revision is {NEW}: leave"):
        commit_of(workers(OLD).values(), NEW)
    with pytest.raises(ConfigError, match="several commits"):
        commit_of(workers(OLD, NEW).values(), "")


def test_workers_of_another_commit_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    check = CommitCheck(OLD)
    listed = workers(OLD, NEW, "")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert set(check.alike(listed)) == {"d-0", "d-2"}
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert all(text in message for text in ("d-1", OLD, NEW, "Start the router again"))


def test_a_router_of_a_folder_takes_all() -> None:
    assert CommitCheck("").alike(workers(OLD, "")) == workers(OLD, "")
