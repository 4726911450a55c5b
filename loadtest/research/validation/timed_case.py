"""Defines the validation with timed workers: their costs, and the simulator's settings for them."""

from __future__ import annotations

from loadtest.common.peer_servers import SERVED_NAME
from loadtest.generator.workload.lengths import Lengths
from loadtest.research.timed.cluster import TimedCluster, TimedSettings
from loadtest.research.timed.model_folder import CONTEXT_TOKENS, KV_TOKEN_BYTES
from loadtest.research.validation.offered_load import OfferedLoad
from loadtest.research.validation.validate import LiveCluster
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.step_model import FittedCosts
from planning.simulator.costs.worker_profile import WorkerProfile
from worker.costs.step_costs import StepCosts

COSTS = StepCosts(prefill=(15.0, 0.4, 0.00002), step=(30.0, 1.5, 0.002))
"""Step costs with a GPU's pattern, slowed so that two cores carry eight workers. A prompt token
costs much less than a step, and another sequence adds little to a step."""
SLOS = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.075}
INPUTS, OUTPUTS = Lengths.parse("lognormal:450,0.7,3000"), Lengths.parse("lognormal:60,0.6,300")
PROBE = OfferedLoad(1.0, 8.0, Lengths.parse("400"), Lengths.parse("12"), "constant")
_WIRE_BYTES_PER_S = 1e9
"""Bandwidth of shared memory in bytes per second. It has no influence here, since the timed
engine's KV is very small."""


def settings_of(prefill: int, decode: int) -> TimedSettings:
    """Return the settings of a cluster with these numbers of timed workers."""
    return TimedSettings(prefill, decode, COSTS, config=SLOS)


def live_cluster(cluster: TimedCluster) -> LiveCluster:
    """Return a timed cluster in the form that the validation drives."""
    url = f"http://{cluster.router.http}"
    return LiveCluster(url, SERVED_NAME, shape_of(cluster.settings), cluster.config)


def shape_of(settings: TimedSettings) -> ClusterShape:
    """Return the shape of a cluster with these settings, in the form that the simulator needs."""
    profile = WorkerProfile(
        name="timed",
        costs=FittedCosts(settings.costs),
        kv_tokens=(settings.kv_pool_mib << 20) // KV_TOKEN_BYTES,
        kv_token_bytes=KV_TOKEN_BYTES,
        layers=1,
        context_length=CONTEXT_TOKENS,
        wire_bytes_per_s=_WIRE_BYTES_PER_S,
        max_sequences=settings.max_sequences,
        chunk_tokens=settings.chunk_tokens,
        is_cpu=True,
    )
    return ClusterShape(settings.prefill, settings.decode, profile, profile)
