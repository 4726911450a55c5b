"""`baton calibrate`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.registry import WorkerRecord
    from deploy.cluster_state import ClusterState

_CALL_S = 0.0005
"""A message between router and worker on one machine, one way."""
_REGISTRY_S = 5.0
_VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}


def calibrate(
    output: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Write the profile there.")
    ],
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The cluster's HTTP front. Default: that of this machine's."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="The workers' `chunk_tokens`. Default: a CPU's.")
    ] = 512,
    gpu: Annotated[bool, typer.Option("--gpu", help="The workers compute on GPUs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts that are sent.")] = 0,
) -> None:
    """Time a running cluster that has nothing else to do, and write what its workers cost.

    Prompts of growing length alone, answers side by side, and handoffs of growing size: a minute or
    two. The profile is for `baton simulate`.
    """
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.cluster_state import running_clusters  # noqa: PLC0415
    from loadtest.transfer_rows import write_json  # noqa: PLC0415

    cluster = next((one for one in running_clusters() if http in (None, one.http)), None)
    if cluster is None:
        typer.secho("error: no such cluster runs on this machine", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)
    try:
        fields = asyncio.run(
            _measured(cluster, chunk_tokens=chunk_tokens, is_cpu=not gpu, seed=seed)
        )
        write_json(output, json.dumps(fields, indent=1) + "\n")
    except BatonError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"prefill {_formula(fields['prefill'], 'n', 'n*context')}; "
        f"step {_formula(fields['step'], 'batch', 'context')}; "
        f"handoff {fields['handoff_s'] * 1e3:.1f} ms + bytes at "
        f"{fields['wire_bytes_per_s'] / 1e9:.2f} GB/s"
    )


def _formula(values: list[float], first: str, second: str) -> str:
    a, b, c = values
    return f"{a:.2f} + {b:.4f}*{first} + {c:.7f}*{second} ms"


async def _measured(
    cluster: ClusterState, *, chunk_tokens: int, is_cpu: bool, seed: int
) -> dict[str, Any]:
    """The profile's fields. Raises BatonError."""
    from baton.client.async_http_client import AsyncHttpClient  # noqa: PLC0415
    from loadtest.simulator.fitted_costs import FittedCosts  # noqa: PLC0415
    from loadtest.simulator.live_probe import Limits, LiveProbe  # noqa: PLC0415
    from loadtest.simulator.live_timings import live_costs  # noqa: PLC0415
    from loadtest.simulator.worker_kinds import profile_fields  # noqa: PLC0415
    from loadtest.simulator.worker_profile import WorkerProfile  # noqa: PLC0415

    record = await _decode_worker(cluster)
    shape = record.geometry
    token_bytes = 2.0 * shape.layers * shape.kv_heads * shape.head_dim
    token_bytes *= _VALUE_BYTES.get(shape.kv_dtype, 2.0)
    kv_tokens = record.total_blocks * shape.block_size
    limits = Limits(
        # Every tokenizer that is served has more.
        vocabulary=1000,
        context_tokens=record.context_length,
        sequences=record.max_sequences,
        kv_tokens=kv_tokens,
        kv_token_bytes=token_bytes,
    )
    async with AsyncHttpClient(f"http://{cluster.http}") as client:
        timings = await LiveProbe(client, limits, seed).run()
    # To the prefill worker and back.
    found = live_costs(timings, 2 * _CALL_S)
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
            # As ``engine.engine`` bounds a CPU's chunks.
            chunk_keys=1 << 19 if is_cpu else 0,
            is_cpu=is_cpu,
            handoff_s=found.handoff_s,
            call_s=_CALL_S,
        )
    )


async def _decode_worker(cluster: ClusterState) -> WorkerRecord:
    """Any of them. Raises Unavailable."""
    import redis  # noqa: PLC0415

    from baton.errors import Unavailable  # noqa: PLC0415
    from baton.redis_client import redis_client  # noqa: PLC0415
    from baton.registry import Registry  # noqa: PLC0415

    try:
        async with asyncio.timeout(_REGISTRY_S), redis_client(cluster.redis_url) as client:
            records = await Registry(client, cluster.cluster_id).all()
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"the registry cannot be read: {error}") from error
    found = next((record for record in records.values() if record.role == "decode"), None)
    if found is None:
        raise Unavailable("the cluster has no decode worker")
    return found
