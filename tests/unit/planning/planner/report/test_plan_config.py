"""A plan is a configuration that `baton serve` and `baton simulate` take."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from baton.config.cluster import Config, load_config
from baton.config.pools import ContextClass
from planning.planner.cluster_kind import DEFAULT_TRANSPORTS, ResourceBudget, WorkerKind
from planning.planner.evaluation import Evaluation
from planning.planner.plan import Plan
from planning.planner.planner import CapacityPlanner
from planning.planner.report.plan_config import plan_file, plan_toml
from planning.planner.worker_kinds import Roles, transports
from planning.simulator.costs.worker_profile import read_profile
from tests.support.deploy.chart import containers, render
from tests.support.loadtest.plans import SMALL, config, evaluation, trace


def _plan(tried: Evaluation, kind: WorkerKind, other: WorkerKind) -> Plan:
    found = Roles((kind,), (other,), (), reachable=True)
    return CapacityPlanner(
        tried, found, transports(DEFAULT_TRANSPORTS), ResourceBudget(gpus=8), 0.9
    ).plan()


def _loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_config(path)


@pytest.fixture
def settings() -> Config:
    return Config(
        policy="least_loaded",
        local_prefill="never",
        slo_ttft_s=1.5,
        slo_tpot_s=0.04,
        classes=(
            ContextClass(name='"short"', max_tokens=128, slo_ttft_s=0.75),
            ContextClass(name="rest", local_prefill="auto"),
        ),
        redis_url="redis://:secret@127.0.0.1:1/0",
    )


def test_gpus(tmp_path: Path, settings: Config) -> None:
    pair, one = (WorkerKind("h100", read_profile("h100", tensor_parallel=n), 3.0) for n in (2, 1))
    plan = _plan(evaluation(trace(10, 0.2), settings=settings), pair, one)
    text = plan_toml(plan, settings, "what was asked")
    read = _loaded(tmp_path, text)
    assert "secret" not in text
    assert "\ntp = 2" in text
    assert text.count("tp =") == 1
    assert (read.policy, read.local_prefill) == ("least_loaded", "never")
    assert (read.slo_ttft_s, read.slo_tpot_s) == (1.5, 0.04)
    assert read.classes == settings.classes
    assert read.transport == plan.chosen.kind.transport.name
    pools = {pool.role: pool for pool in read.pools}
    assert pools["prefill"].count == plan.chosen.counts.prefill
    assert pools["decode"].count == plan.chosen.counts.decode
    assert (pools["prefill"].tp, pools["decode"].tp) == (2, 1)
    assert {pool.resources["GPU"] for pool in read.pools} == {1}
    assert {pool.device for pool in read.pools} == {"cuda"}
    assert {(pool.max_sequences, pool.chunk_tokens) for pool in read.pools} == {(256, 8192)}


def test_values_of_the_chart(tmp_path: Path, settings: Config) -> None:
    kind = WorkerKind("h100", read_profile("h100"), 3.0)
    plan = _plan(evaluation(trace(10, 0.2), settings=settings), kind, kind)
    toml, written = (
        plan_file(Path(name), plan, settings, "what was asked") for name in ("p.toml", "p.yaml")
    )
    assert toml == plan_toml(plan, settings, "what was asked")
    assert written.count("what was asked") == 1
    values = yaml.safe_load(written)
    assert values["config"] == tomllib.loads(toml)
    counts = plan.chosen.counts
    assert values["standalone"]["resources"]["limits"] == {
        "nvidia.com/gpu": counts.prefill + counts.decode
    }
    path = tmp_path / "p.yaml"
    path.write_text(written)
    rendered = render("open-values.yaml", "--values", str(path))
    (container,) = [one for name, one in containers(rendered) if name.endswith("/baton")]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == sum(
        (counts.prefill, counts.decode)
    )
    # A measured profile needs none.
    plan = _plan(evaluation(trace(10, 0.2), settings=settings), SMALL, SMALL)
    written = plan_file(path, plan, settings, "what was asked")
    assert yaml.safe_load(written).keys() == {"config"}


def test_a_measured_profile(tmp_path: Path, settings: Config) -> None:
    plan = _plan(evaluation(trace(10, 0.2), settings=settings), SMALL, SMALL)
    read = _loaded(tmp_path, plan_toml(plan, settings, "what was asked"))
    assert read.transport == "auto"
    assert {pool.device for pool in read.pools} == {"auto"}
    assert not any(pool.resources for pool in read.pools)
    assert {pool.kv_pool_mib for pool in read.pools} == {160}


def test_a_plan_without_prefill_workers_is_served_by_decode_workers(tmp_path: Path) -> None:
    cpu = replace(SMALL, profile=replace(SMALL.profile, is_cpu=True))
    plan = _plan(evaluation(trace(10, 0.3, prompt=100, answer=20)), cpu, cpu)
    assert plan.chosen.counts == (0, 1)
    # The search leaves prompts to prefill workers, which this plan has not.
    read = _loaded(tmp_path, plan_toml(plan, config(), "what was asked"))
    assert read.local_prefill == "auto"
    assert {pool.role: pool.count for pool in read.pools} == {"prefill": 0, "decode": 1}
