"""Runs `baton serve` with timed workers: real Ray, supervisor and routers, and steps that only
sleep.

    python -m loadtest.research.validation.timed_up --prefill 3 --decode 3 --config FILE

Use it for tests that need more workers than there are cores, such as live runs of the autoscaler:
roles change, pools are scaled and workers are replaced as in any cluster. FILE has further
settings, as for `baton serve`. The model is made here, and its name in the API is `m`. Prompts may
be token ids, or text, in which each byte is a token.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from baton.config.cluster import Config, load_config
from baton.config.pools import PoolConfig
from deploy.launcher.launcher import run_cluster
from deploy.processes.progress import Progress
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.research.timed.model_folder import write_model_folder
from loadtest.research.timed.timed_actors import TimedSupervisorActor
from loadtest.research.validation.timed_case import COSTS
from worker.costs.step_costs import Coefficients, StepCosts

KV_POOL_MIB = 8
"""KV pool size in MiB: 16384 blocks of 16 tokens."""
_CHUNK_TOKENS = 512


def main() -> None:
    """Serve with timed workers until SIGINT or SIGTERM."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-timed-") as folder:
        model = write_model_folder(Path(folder), StepCosts(given.prefill_costs, given.step_costs))
        config = configuration(given, model)
        sys.exit(run_cluster(config, Progress(Console()), TimedSupervisorActor))


def configuration(given: argparse.Namespace, model: Path) -> Config:
    """Return the configuration of the cluster. Raises the errors of
    ``baton.config.cluster.load_config``.
    """
    pools = tuple(
        PoolConfig(
            name=role,
            role=role,
            count=count,
            # Workers with a fixed number of threads do not share cores step by step.
            threads=1,
            max_sequences=given.max_sequences,
            chunk_tokens=_CHUNK_TOKENS,
            kv_pool_mib=given.kv_pool_mib,
        )
        for role, count in (("prefill", given.prefill), ("decode", given.decode))
    )
    return load_config(
        given.config,
        pools=pools,
        model=str(model),
        served_model_name=SERVED_NAME,
        http=given.http,
        grpc=given.grpc,
        drafter="none",
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--prefill", type=int, default=1, help="initial workers of that role")
    options.add_argument("--decode", type=int, default=1, help="likewise")
    options.add_argument("--http", help="host:port of the HTTP front; port 0 takes a free one")
    options.add_argument("--grpc", help="the same of the gRPC front")
    options.add_argument("--config", type=Path, help="TOML, as for `baton serve`")
    options.add_argument("--max-sequences", type=int, default=64, help="of a worker's step")
    options.add_argument(
        "--kv-pool-mib", type=int, default=KV_POOL_MIB, help="of a worker; 1 MiB is 2048 blocks"
    )
    for name, costs, what in (
        ("--prefill-costs", COSTS.prefill, "n prompt tokens: a + b*n + c*n*context"),
        ("--step-costs", COSTS.step, "a decode step: a + b*batch + c*context_tokens"),
    ):
        help_text = f"milliseconds of {what}, as a,b,c; default: {','.join(map(str, costs))}"
        options.add_argument(name, type=_coefficients, default=costs, help=help_text)
    return options


def _coefficients(text: str) -> Coefficients:
    a, b, c = (float(part) for part in text.split(","))
    return a, b, c


if __name__ == "__main__":
    main()
