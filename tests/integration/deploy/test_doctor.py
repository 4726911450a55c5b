from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from baton.config.cluster import Config
from baton.errors import Unavailable
from deploy.cli.main import app
from deploy.doctor import pair_check
from deploy.doctor.doctor import CHECKS, examine
from deploy.doctor.doctor_host import host_checks
from deploy.doctor.pair_check import MIBS, check_pair


def test_this_machine_is_fit() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    found = {finding.what: finding for finding in examine(CHECKS)}
    for name in ("Python", "torch", "embedded Valkey", "Ray", "transport gloo", "transport shm"):
        assert found[name].usable, found[name].detail
        assert name in result.output
    assert os.access(found["embedded Valkey"].detail, os.X_OK)


def test_two_processes_exchange_data() -> None:
    """The steps of ``--nccl``, over gloo."""
    steps = check_pair("gloo", ("cpu", "cpu"))
    assert [step.bytes for step in steps] == [2 * mib << 20 for mib in MIBS]
    assert all(step.gb_per_s > 0 for step in steps)


@pytest.mark.long
def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(Unavailable, match=r"process on cuda:99 ended with 1: \w*Error: "):
        check_pair("gloo", ("cpu", "cuda:99"))
    assert ends_left() == []


def test_processes_that_do_not_finish_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_check, "_DEADLINE_S", 0.0)
    with pytest.raises(Unavailable, match="did not finish within"):
        check_pair("gloo", ("cpu", "cpu"))
    assert ends_left() == []


def ends_left() -> list[int]:
    """The children of this process that exchange data."""
    children = psutil.Process().children()
    return [one.pid for one in children if "deploy.doctor.pair_check" in one.cmdline()]


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


@pytest.mark.long
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
