"""`baton simulate`: simulates a cluster on a trace and prints its figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.config.cluster import Config
from planning.common.report import print_whole, this_machine, whole_table, write_json
from planning.common.traces import read_trace
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import read_profile
from planning.simulator.simulation import simulate
from planning.simulator.summary import summary

Say = Callable[[str], None]
_USES = (
    ("MFU", "busy", "mfu_busy"),
    ("MFU", "wall", "mfu_wall"),
    ("MBU", "busy", "mbu_busy"),
    ("MBU", "wall", "mbu_wall"),
)
"""Table columns of hardware utilization. Each has its name, the time over which it is measured, and
its key in the summary."""
_PARTS = ("ttft_s", "tpot_s", "itl_s", "e2el_s")


@dataclass(frozen=True, slots=True)
class SimulateSettings:
    """Inputs of a simulation."""

    trace: Path
    prefill: int
    """Number of prefill workers; 0: every worker computes the prompts that it decodes."""
    decode: int
    profile: str
    """Name of an accelerator or of a profile's file. It applies to each role that has no profile of
    its own."""
    prefill_profile: str = ""
    decode_profile: str = ""
    model_config: str = ""
    """Name of a model, or path of its config.json; needed if a profile is an accelerator's name."""
    tensor_parallel: int = 1
    """Number of GPUs per worker."""
    scale_time: float = 1.0
    scale_length: float = 1.0
    """Divisor of the trace's lengths. ``scale_time`` is the divisor of its times."""
    hosts: int = 0
    """Number of machines that the workers share. 0 means one machine for each worker."""
    seed: int = 0
    block_tokens: int = 0
    """Number of tokens of a KV block; 0: see ``simulation.simulate``."""
    routers: int = 1

    def shape(self) -> ClusterShape:
        """Return the cluster to simulate. Raises ConfigError."""
        kinds = {
            name: read_profile(name, self.model_config, tensor_parallel=self.tensor_parallel)
            for name in (self.prefill_profile or self.profile, self.decode_profile or self.profile)
        }
        prefill, decode = (
            kinds[own or self.profile] for own in (self.prefill_profile, self.decode_profile)
        )
        return ClusterShape(self.prefill, self.decode, prefill, decode, hosts=self.hosts)


def run_simulation(settings: SimulateSettings, config: Config) -> dict[str, Any]:
    """Run the simulation. Return its figures, the inputs, and the wall time ``wall_s``. Raises
    ConfigError.
    """
    trace = read_trace(settings.trace, settings.scale_time, settings.scale_length)
    shape = settings.shape()
    began = time.perf_counter()
    result = simulate(
        trace.requests,
        shape,
        config,
        routers=settings.routers,
        trace_block=trace.block_tokens,
        block_tokens=settings.block_tokens,
        seed=settings.seed,
    )
    asked = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()}
    figures = summary(result, shape, config)
    return figures | {"settings": asked, "wall_s": time.perf_counter() - began}


def simulate_command(
    settings: SimulateSettings, config: Config, say: Say, console: Console, output: Path | None
) -> None:
    """Simulate, print the tables, and write JSON to ``output`` if given. Raises ConfigError."""
    if output is not None:
        write_json(output, "{}\n")
    figures = run_simulation(settings, config)
    say(
        f"{figures['requests']} requests, {figures['input_tokens']:,} tokens in, "
        f"{figures['output_tokens']:,} out, {figures['span_s']:.0f} s simulated in "
        f"{figures['wall_s']:.1f} s"
    )
    _print(figures, console)
    say(this_machine().line())
    if output is not None:
        write_json(output, json.dumps(figures, indent=1) + "\n")


def _print(figures: dict[str, Any], console: Console) -> None:
    table = whole_table(
        "requests", *(f"{part[:-2]} {p}, ms" for part in _PARTS for p in ("p50", "p95")), title=""
    )
    for name, row in {"all": figures["latency"], **figures["classes"]}.items():
        cells = [_ms(row[part][p]) for part in _PARTS for p in ("p50", "p95")]
        table.add_row(f"{name} ({row.get('requests', figures['requests'])})", *cells)
    print_whole(console, table)
    columns = ("pool", "workers", "busy", "mean batch", "wire")
    pools = whole_table(*columns, *(f"{name}, {of}" for name, of, _ in _USES), title="")
    for role, pool in figures["pools"].items():
        pools.add_row(
            role,
            str(pool["workers"]),
            f"{pool['busy_share']:.1%}",
            f"{pool['mean_batch']:.1f}",
            f"{pool['wire_share']:.1%}",
            *(_share(pool[key]) for _, _, key in _USES),
        )
    print_whole(console, pools)
    shares = f"{figures['slo_attainment']:.1%} of {figures['offered_per_s']:.2f} requests/s"
    console.print(
        f"goodput {figures['goodput_per_s']:.2f} requests/s ({shares} met every SLO; "
        f"{figures['shed']} shed, {figures['failed']} failed)",
        highlight=False,
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
