"""`baton calibrate`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.operate.cluster_selection import ClusterId, target
from deploy.cli.options.command_line import Http, clear_errors, fail, say

if TYPE_CHECKING:
    import httpx

    from baton.store.registry import WorkerRecord
    from deploy.processes.cluster_state import ClusterState

_REGISTRY_S = 5.0
_VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}


def calibrate(
    output: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Write the profile to FILE.")
    ],
    cluster: ClusterId = None,
    http: Http = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="--chunk-tokens of the workers; 512 is the default on CPUs.")
    ] = 512,
    gpu: Annotated[bool, typer.Option("--gpu", help="The workers run on GPUs.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
) -> None:
    """Write a hardware profile of a running cluster's workers.

    It measures an idle cluster on this machine. `baton simulate` and `baton plan` read the profile.
    The cluster must have one prefill and one decode worker, and --local-prefill never. It takes one
    to two minutes.

        baton calibrate --json my-machine.json
    """
    from planning.common.report import write_json  # noqa: PLC0415

    chosen = target(http, cluster)
    state = chosen.cluster
    if state is None:
        fail(f"{chosen} is not one of your clusters on this machine: calibrate it where it runs")
    say(f"calibrating {chosen}")
    with clear_errors():
        fields = asyncio.run(_measured(state, chunk_tokens=chunk_tokens, is_cpu=not gpu, seed=seed))
        write_json(output, json.dumps(fields, indent=1) + "\n")
    typer.echo(
        f"prefill {_formula(fields['prefill'], 'n', 'n*context')}; "
        f"step {_formula(fields['step'], 'batch', 'context')}; "
        f"handoff {fields['handoff_s'] * 1e3:.1f} ms + bytes at "
        f"{fields['wire_bytes_per_s'] / 1e9:.2f} GB/s; message {fields['call_s'] * 1e3:.1f} ms"
    )
    sharing = fields["sharing"]
    typer.echo(
        f"next to prompts a step takes {sharing['decode_beside_prefill']:.2f} times as long, next "
        f"to long ones {sharing['decode_beside_long_prefill']:.2f}; prompts next to steps "
        f"{sharing['prefill_beside_decode']:.2f}"
    )


def _formula(values: list[float], first: str, second: str) -> str:
    a, b, c = values
    return f"{a:.2f} + {b:.4f}*{first} + {c:.7f}*{second} ms"


async def _measured(
    cluster: ClusterState, *, chunk_tokens: int, is_cpu: bool, seed: int
) -> dict[str, Any]:
    """Measure the fields of the hardware profile. Raises BatonError."""
    from baton.client.http_api import open_async_api  # noqa: PLC0415
    from baton.errors import ConfigError  # noqa: PLC0415
    from engine.scheduling.sequence import SchedulerLimits  # noqa: PLC0415
    from planning.simulator.calibration.live_probe import LiveProbe  # noqa: PLC0415
    from planning.simulator.calibration.live_timings import live_costs  # noqa: PLC0415
    from planning.simulator.calibration.probe_requests import Limits, ProbeRequests  # noqa: PLC0415
    from planning.simulator.costs.step_model import FittedCosts  # noqa: PLC0415
    from planning.simulator.costs.worker_profile import (  # noqa: PLC0415
        WorkerProfile,
        profile_fields,
    )

    record = await the_decode_worker(cluster)
    shape = record.geometry
    token_bytes = 2.0 * shape.layers * shape.kv_heads * shape.head_dim
    token_bytes *= _VALUE_BYTES.get(shape.kv_dtype, 2.0)
    kv_tokens = record.total_blocks * shape.block_size
    limits = Limits(
        # Every served tokenizer has a larger vocabulary.
        vocabulary=1000,
        context_tokens=record.context_length,
        sequences=record.max_sequences,
        kv_tokens=kv_tokens,
        kv_token_bytes=token_bytes,
    )
    # ``engine.engine`` limits chunks on a CPU in the same way.
    chunk_keys = 1 << 19 if is_cpu else 0
    scheme = "https" if cluster.tls else "http"
    page = f"{scheme}://{cluster.operators}/metrics"
    async with open_async_api(f"{scheme}://{cluster.http}", tls=cluster.tls_files) as client:
        probe = LiveProbe(ProbeRequests(client, cluster.model, limits, seed))
        local = await local_prompts(client, page)
        await probe.warm_up()
        if await local_prompts(client, page) > local:
            raise ConfigError(
                "decode workers compute prompts here, but calibration must time handoffs: start "
                "the cluster with --local-prefill never"
            )
        timings = await probe.run()
    bounds = SchedulerLimits(
        1, chunk_tokens, record.max_sequences, record.context_length, chunk_keys
    )
    found = live_costs(timings, bounds)
    return profile_fields(
        WorkerProfile(
            name=record.model or cluster.model,
            costs=FittedCosts(found.costs),
            kv_tokens=kv_tokens,
            kv_token_bytes=token_bytes,
            layers=shape.layers,
            context_length=record.context_length,
            wire_bytes_per_s=found.wire_bytes_per_s,
            max_sequences=record.max_sequences,
            chunk_tokens=chunk_tokens,
            chunk_keys=chunk_keys,
            is_cpu=is_cpu,
            handoff_s=found.handoff_s,
            call_s=found.call_s,
            sharing=found.sharing,
            shares_cores=record.shares_cores,
        )
    )


async def local_prompts(client: httpx.AsyncClient, url: str) -> float:
    """Return the number of prompts that decode workers have computed, as a router has counted them.
    ``url`` is the address of the router's metrics.

    Raises BatonError.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    from baton.client.http_api import api_errors  # noqa: PLC0415

    with api_errors():
        page = (await client.get(url, timeout=_REGISTRY_S)).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "baton_route_decisions_total" and sample.labels["decision"] == "local"
    )


async def the_decode_worker(cluster: ClusterState) -> WorkerRecord:
    """Return the registry record of the only decode worker. Raises Unavailable, or ConfigError if
    there are several."""
    import redis  # noqa: PLC0415

    from baton.errors import ConfigError, Unavailable  # noqa: PLC0415
    from baton.store.redis_client import redis_client  # noqa: PLC0415
    from baton.store.registry import Registry  # noqa: PLC0415

    try:
        async with asyncio.timeout(_REGISTRY_S), redis_client(cluster.redis_url) as client:
            records = await Registry(client, cluster.cluster_id).all()
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"the registry cannot be read: {error}") from error
    by_role = {
        role: [record for record in records.values() if record.role == role]
        for role in ("prefill", "decode")
    }
    for role, found in by_role.items():
        if not found:
            raise Unavailable(f"the cluster has no {role} worker")
        if len(found) > 1:
            raise ConfigError(
                f"the cluster has {len(found)} {role} workers, and calibration must time a single "
                "one: start the cluster with --prefill 1 --decode 1"
            )
    return by_role["decode"][0]
