from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from baton.errors import ConfigError
from deploy.cli.main import app
from deploy.cli.options.exit_codes import ExitCode
from deploy.doctor import doctor, doctor_host
from deploy.doctor.doctor import Check, Missing, draw, draw_steps, examine, is_fit, nccl_devices
from deploy.doctor.pair_check import PairStep

runner = CliRunner()


def there() -> str:
    return "version 1"


def missing() -> str:
    raise Missing("install [it]")


def lines(table: object) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip().split(maxsplit=2) for line in captured.get().splitlines()]


def test_what_is_needed_decides() -> None:
    found = examine([Check("one", there, needed=True), Check("two", missing)])
    assert is_fit(found)
    assert not is_fit([*found, *examine([Check("three", missing, needed=True)])])
    assert lines(draw(found))[1] == ["one", "ok", "version 1"]


def test_what_is_missing_is_said() -> None:
    found = examine([Check("one", missing), Check("two", missing, needed=True)])
    assert [finding.state for finding in found] == ["no", "missing"]
    assert {finding.detail for finding in found} == {"install [it]"}


@pytest.mark.parametrize(("needed", "code"), [(True, 4), (False, 0)])
def test_the_exit_code_says_it(monkeypatch: pytest.MonkeyPatch, needed: bool, code: int) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (Check("one", missing, needed=needed),))
    monkeypatch.setattr(doctor_host, "host_checks", lambda config: ())
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "install [it]" in result.output


def test_findings_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (Check("one", missing, needed=True), Check("two", there))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    monkeypatch.setattr(doctor_host, "host_checks", lambda config: ())
    result = runner.invoke(app, ["doctor", "-o", "json"])
    assert result.exit_code == ExitCode.UNHEALTHY
    assert json.loads(result.stdout) == {
        "fit": False,
        "checks": [
            {
                "name": "one",
                "state": "missing",
                "usable": False,
                "needed": True,
                "detail": "install [it]",
            },
            {
                "name": "two",
                "state": "ok",
                "usable": True,
                "needed": False,
                "detail": "version 1",
            },
        ],
    }


def test_a_module_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(doctor, "import_module", broken)
    found = {finding.what: finding for finding in examine(doctor.CHECKS)}
    for name in ("torch", "Ray", "transport grpc"):
        assert found[name].state == "missing"
        assert "cannot be imported" in found[name].detail


@pytest.mark.parametrize(
    ("gpus", "access", "detail"),
    [(1, True, "on one GPU"), (2, True, "forces it"), (2, False, "cannot access")],
)
def test_cuda_ipc_between_two_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, access: bool, detail: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: access)
    (check,) = (one for one in doctor.CHECKS if one.what == "transport cuda_ipc")
    (found,) = examine([check])
    assert found.usable
    assert detail in found.detail


def test_steps_have_their_rate() -> None:
    step = PairStep("moved", 2 << 20, 0.001)
    assert step.gb_per_s == pytest.approx(2.097152)
    assert lines(draw_steps([step]))[1] == ["moved", "2", "1.0  2.10"]


def test_nccl_needs_nccl_and_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="NCCL, and this torch is a build for CPUs"):
        nccl_devices()
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="two GPUs, and torch finds 1"):
        nccl_devices()
    result = runner.invoke(app, ["doctor", "--nccl"])
    assert result.exit_code == ExitCode.UNSUPPORTED
    assert "two GPUs" in result.output
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert nccl_devices() == ("cuda:0", "cuda:1")
