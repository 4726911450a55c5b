"""Small clusters and traces for the simulator's tests."""

from __future__ import annotations

from hypothesis import strategies as st

from baton.config.choices import LocalPrefill
from baton.config.cluster import Config
from baton.config.pools import ContextClass
from planning.common.traces import TracedRequest
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.sharing import Sharing
from planning.simulator.costs.step_model import FittedCosts
from planning.simulator.costs.worker_profile import WorkerProfile
from worker.costs.step_costs import StepCosts

# Odd numbers, so that no two events fall on the same moment by chance.
COSTS = StepCosts((3.137, 0.1713, 0.0000213), (5.119, 0.2917, 0.0013177))
TRACE_BLOCK = 32
SHARING = Sharing(1.417, 1.839, 1.231, 1.193, 1.713)


def profile(
    *, kv_tokens: int = 4096, is_cpu: bool = False, max_sequences: int = 8
) -> WorkerProfile:
    """A worker that computes some 6 prompt tokens in a millisecond."""
    return WorkerProfile(
        name="small",
        costs=FittedCosts(COSTS),
        kv_tokens=kv_tokens,
        kv_token_bytes=40_960,
        layers=8,
        context_length=2048,
        wire_bytes_per_s=0.93e9,
        max_sequences=max_sequences,
        chunk_tokens=256,
        is_cpu=is_cpu,
        handoff_s=0.00217,
        call_s=0.000531,
        sharing=SHARING,
    )


def shape(
    prefill: int, decode: int, worker: WorkerProfile | None = None, *, hosts: int = 0
) -> ClusterShape:
    """All workers alike."""
    worker = worker or profile()
    return ClusterShape(prefill, decode, worker, worker, hosts=hosts)


def config(
    local_prefill: LocalPrefill = "never", *, deadline_s: float = 300.0, shed_after_s: float = 0.0
) -> Config:
    """``shed_after_s``: an SLO by which requests are refused; 0: none is."""
    return Config(
        local_prefill=local_prefill,
        admission="slo" if shed_after_s else "queue",
        slo_ttft_s=shed_after_s or 2.0,
        request_deadline_s=deadline_s,
        slo_tpot_s=0.03,
        classes=(ContextClass(name="short", max_tokens=128), ContextClass(name="long")),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    """Up to a dozen requests with prefixes in common."""
    count = draw(st.integers(1, 12))
    at_s = 0.0
    requests = []
    for _ in range(count):
        at_s += draw(st.floats(0.0, 0.4)) ** 2 * 1.0137
        prompt = draw(st.integers(1, 600))
        blocks = -(-prompt // TRACE_BLOCK)
        shared = draw(st.integers(0, blocks))
        family = draw(st.integers(0, 2))
        own = draw(st.integers(0, 1 << 40))
        hashes = [family * 1000 + n for n in range(shared)]
        hashes += [own + n for n in range(shared, blocks)]
        answer = draw(st.integers(1, 60))
        requests.append(TracedRequest(at_s, prompt, answer, tuple(hashes)))
    return requests
