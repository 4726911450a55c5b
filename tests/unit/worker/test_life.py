"""What a life of a worker says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from baton.config.cluster import Config
from baton.request import Geometry
from worker.life import Lasting, _record
from worker.settings import WorkerSettings


def test_a_worker_publishes_the_commit_of_its_model() -> None:
    config = Config(revision="a" * 40)
    settings = WorkerSettings(
        config=config,
        pool=config.pools[0],
        slot="prefill-0",
        model_path="",
        model_name="tiny",
        redis_url="",
        cluster_id="c",
        threads=1,
    )
    engine = SimpleNamespace(
        fingerprint="f",
        cache=SimpleNamespace(geometry=lambda: Geometry(16, 2, 3, 64, "bfloat16")),
        context_length=512,
        pool=SimpleNamespace(total=10),
    )
    costs = SimpleNamespace(prefill=(0.0, 0.0, 0.0), step=(0.0, 0.0, 0.0))
    lasting = SimpleNamespace(core=SimpleNamespace(engine=engine), costs=costs, metrics_port=2)
    assert (
        _record(settings, cast(Lasting, lasting), "prefill-0:1", "127.0.0.1:1").revision == "a" * 40
    )
