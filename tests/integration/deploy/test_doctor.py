from __future__ import annotations

import os

from typer.testing import CliRunner

from deploy.cli import app
from deploy.doctor import CHECKS, examine
from deploy.pair_check import BLOCK_COUNTS, check_pair
from deploy.pair_end import BLOCK_BYTES


def test_this_machine_is_fit() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    found = {finding.what: finding for finding in examine(CHECKS)}
    for name in ("Python", "torch", "embedded Valkey", "Ray", "transport gloo", "transport shm"):
        assert found[name].usable, found[name].detail
        assert name in result.output
    assert os.access(found["embedded Valkey"].detail, os.X_OK)


def test_the_self_test_moves_aborts_and_forms_again() -> None:
    """The steps of ``--nccl``, over gloo."""
    steps = list(check_pair("gloo", ("cpu", "cpu")))
    sizes = [count * BLOCK_BYTES for count in BLOCK_COUNTS]
    assert [step.bytes for step in steps] == [*sizes, *sizes, 0, *sizes, *sizes, 0]
    assert all(step.seconds > 0 for step in steps)
