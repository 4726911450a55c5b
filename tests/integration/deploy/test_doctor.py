from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from baton.config import Config
from deploy.cli import app
from deploy.doctor import CHECKS, examine
from deploy.doctor_host import host_checks
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


def test_redis_and_its_clock_are_asked(redis_url: str) -> None:
    found = {
        finding.what: finding
        for finding in examine(
            check
            for check in host_checks(Config(redis_url=redis_url))
            if check.what in ("Redis", "clock")
        )
    }
    assert found["Redis"].usable, found["Redis"].detail
    assert "answers in" in found["Redis"].detail
    assert "against Redis" in found["clock"].detail


def test_a_configuration_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('redis_url = "redis://127.0.0.1:1"\n')
    result = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert result.exit_code == 4, result.output
    assert "GB/s between" in result.output
    file.write_text("nothing = 1\n")
    result = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert result.exit_code == 1
    assert "nothing" in result.output
