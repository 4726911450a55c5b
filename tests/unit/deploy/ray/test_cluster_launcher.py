"""The file for Ray's cluster launcher: Ray takes it, and Baton what it runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.deploy.baton_commands import parse

FILE = Path(__file__).parents[4] / "deploy" / "ray" / "cluster.yaml"


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def words(commands: list[str], program: str) -> list[str]:
    """What the one command that runs ``program`` gives it, up to the shell's own signs."""
    (line,) = [one for one in commands if f" {program} " in f" {one} " and "ray stop" not in one]
    given = shlex.split(line)
    arguments = given[given.index(program) + 1 :]
    ends = [n for n, word in enumerate(arguments) if word.startswith((">", "<", "&", "2>"))]
    return arguments[: ends[0]] if ends else arguments


def test_ray_takes_it() -> None:
    from ray.autoscaler.sdk import bootstrap_config  # noqa: PLC0415

    bootstrap_config(cluster(), no_config_cache=True)
    spoilt = cluster() | {"worker_start_commands": []}
    with pytest.raises(jsonschema.ValidationError):
        bootstrap_config(spoilt, no_config_cache=True)


def test_machines_join_by_baton() -> None:
    parsed = parse(words(cluster()["worker_start_ray_commands"], "baton"))
    assert parsed.name == "join"
    assert parsed.parameters["address"] == "$RAY_HEAD_IP:6379"


def test_ray_takes_the_heads_options() -> None:
    from ray.scripts.scripts import start  # noqa: PLC0415

    _, *given = words(cluster()["head_start_ray_commands"], "ray")
    context = start.make_context("start", given)
    assert context.params["head"]
    assert context.params["port"] == 6379
    assert context.params["num_cpus"] == 0
