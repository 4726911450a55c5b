from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.pools import PoolConfig
from deploy.workers.worker_actor import WorkerActor
from loadtest.research.timed.timed_actors import TimedSupervisorActor, TimedWorkerActor
from loadtest.research.validation.timed_case import COSTS
from loadtest.research.validation.timed_up import KV_POOL_MIB, configuration, parser


def test_the_pools_are_as_asked_and_the_rest_is_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("slo_tpot_s = 0.05\n")
    given = parser().parse_args(["--prefill", "2", "--decode", "4", "--config", str(file)])
    config = configuration(given, tmp_path / "model")
    assert [(pool.name, pool.role, pool.count) for pool in config.pools] == [
        ("prefill", "prefill", 2),
        ("decode", "decode", 4),
    ]
    # Sleeping workers share no cores, and draft nothing.
    assert {(pool.threads, pool.kv_pool_mib) for pool in config.pools} == {(1, KV_POOL_MIB)}
    assert config.drafter == "none"
    assert config.slo_tpot_s == 0.05
    assert config.model == str(tmp_path / "model")


def test_costs_are_three_numbers() -> None:
    given = parser().parse_args(["--step-costs", "30,1.5,0.002"])
    assert given.step_costs == (30.0, 1.5, 0.002)
    assert given.prefill_costs == COSTS.prefill
    with pytest.raises(SystemExit):
        parser().parse_args(["--step-costs", "30"])


def test_a_cluster_as_users_have_it_has_no_timed_workers() -> None:
    assert TimedSupervisorActor.worker_class is TimedWorkerActor
    assert WorkerActor.build is not TimedWorkerActor.build
    assert not [name for name in PoolConfig.model_fields if "timed" in name]
