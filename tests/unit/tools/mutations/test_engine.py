"""Each mutation of the engine is killed by its tests."""

from __future__ import annotations

import pytest

from tools.mutate import ROOT, RUN_S, Mutation, Outcome, TreeCopy, read_mutations

pytestmark = [pytest.mark.long, pytest.mark.timeout(RUN_S + 60)]


@pytest.mark.parametrize(
    "mutation",
    read_mutations(ROOT / "tools" / "mutations" / "engine.toml"),
    ids=lambda one: one.name,
)
def test_it_is_killed(mutation: Mutation, copy: TreeCopy) -> None:
    judged = copy.judge(mutation)
    assert judged.outcome is Outcome.KILLED, judged.output
