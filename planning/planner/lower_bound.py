"""Computes a lower bound on the number of workers by arithmetic. A search begins at this bound.

The bound counts only the cheapest requests, as many as the target requires to be good. It assumes a
cache that forgets nothing, and steps that are always full. So a smaller cluster misses the target
by the same cost model, and one of this size usually does too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.config.cluster import Config
from planning.common.traces import TracedRequest
from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.traffic import PlannedTraffic
from planning.simulator.costs.step_model import StepLoad
from planning.simulator.costs.worker_profile import WorkerProfile


def lower_bound(
    kind: ClusterKind, traffic: PlannedTraffic, config: Config, target: float
) -> Counts:
    """Return a lower bound on the number of workers in each pool, at least one. With fewer workers,
    the share of good requests is below ``target``.

    If decode workers may compute prompts, prefill workers are optional, and their bound is 1.
    """
    decode = _decode_floor(kind.decode.profile, traffic, config, target)
    if config.local_prefill != "never":
        return Counts(1, decode)
    return Counts(_prefill_floor(kind.prefill.profile, traffic, config, target), decode)


def prompts(traffic: PlannedTraffic) -> list[tuple[int, int]]:
    """Return two numbers for each counted request: the prompt tokens to compute, and the cached
    tokens before them.

    Every earlier prefix counts as cached, wherever it was computed. So the number of tokens to
    compute is a minimum.
    """
    seen: set[int] = set()
    found = []
    for request in traffic.requests:
        held = 0
        # The last token is always computed.
        full = (request.input_tokens - 1) // traffic.block_tokens
        for number in request.block_hashes[:full]:
            if number not in seen:
                break
            held += 1
        seen.update(request.block_hashes)
        if request.arrival_s >= traffic.counted_from_s:
            tokens = held * traffic.block_tokens
            found.append((request.input_tokens - tokens, tokens))
    return found


def timely_prompts(profile: WorkerProfile, traffic: PlannedTraffic, config: Config) -> float:
    """Return the share of requests whose TTFT an idle worker can meet."""
    met = [
        _lone_s(profile, *prompt) <= config.slo_ttft_of(config.class_of(request.input_tokens))
        for prompt, request in zip(prompts(traffic), traffic.counted, strict=True)
    ]
    return sum(met) / len(met)


def timely_answers(profile: WorkerProfile, traffic: PlannedTraffic, config: Config) -> float:
    """Return the share of requests whose TPOT an idle worker can meet."""
    line = profile.costs.decode_line(1)
    met = [line.seconds(_context(one)) <= config.slo_tpot_s for one in traffic.counted]
    return sum(met) / len(met)


def _prefill_floor(
    profile: WorkerProfile, traffic: PlannedTraffic, config: Config, target: float
) -> int:
    each = [_full_step_s(profile, *prompt) for prompt in prompts(traffic)]
    slo_s = max(config.slo_ttft_of(one.name) for one in config.classes)
    return _workers(each, traffic.span_s + slo_s, target)


def _decode_floor(
    profile: WorkerProfile, traffic: PlannedTraffic, config: Config, target: float
) -> int:
    requests = traffic.counted
    steps = sum(one.output_tokens - 1 for one in requests)
    if not steps:
        return 1
    context = sum((one.output_tokens - 1) * _context(one) for one in requests) / steps
    batch = _largest_batch(profile, context, config.slo_tpot_s)
    line = profile.costs.decode_line(batch)
    each = [
        (one.output_tokens - 1) * (line.base_s / batch + line.per_token_s * _context(one))
        for one in requests
    ]
    longest_s = max(one.output_tokens for one in requests) * config.slo_tpot_s
    slo_s = max(config.slo_ttft_of(one.name) for one in config.classes)
    return _workers(each, traffic.span_s + slo_s + longest_s, target)


def _workers(each_s: Sequence[float], span_s: float, target: float) -> int:
    """Return the number of workers that can finish a ``target`` share of the requests, the cheapest
    ones, within ``span_s`` seconds. ``each_s`` has the time of each request."""
    count = math.ceil(target * len(each_s))
    work_s = sum(sorted(each_s)[:count])
    return max(1, math.ceil(work_s / max(span_s, 1e-9)))


def _largest_batch(profile: WorkerProfile, context: float, slo_tpot_s: float) -> int:
    """Return the largest decode batch that meets the TPOT SLO and fits in memory, at ``context``
    tokens per sequence; at least 1.
    """
    held = min(profile.max_sequences, int(profile.kv_tokens / context))
    least, above = 1, max(1, held) + 1
    while above - least > 1:
        batch = (least + above) // 2
        if profile.costs.decode_line(batch).seconds(batch * context) <= slo_tpot_s:
            least = batch
        else:
            above = batch
    return least


def _context(request: TracedRequest) -> float:
    """Return the number of tokens that a decode step of the request attends to, on average."""
    return request.input_tokens + request.output_tokens / 2


def _full_step_s(profile: WorkerProfile, count: int, held: int) -> float:
    """Return the time that a prompt adds to a full step: its share of the step's time, if all
    prompts in the step are similar."""
    alike = max(1, profile.chunk_tokens // count)
    return profile.costs.seconds(StepLoad(0, 0, ((count, held),) * alike)) / alike


def _lone_s(profile: WorkerProfile, count: int, held: int) -> float:
    """Return the time of a prompt on an otherwise idle worker, which computes it chunk by chunk."""
    seconds = 0.0
    while count > 0:
        chunk = min(count, profile.chunk_tokens)
        seconds += profile.costs.seconds(StepLoad(0, 0, ((chunk, held),)))
        count, held = count - chunk, held + chunk
    return seconds
