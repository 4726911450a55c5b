"""The command line, `baton`. Heavy imports happen in the command that needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from baton.version import VERSION
from deploy.cli import certs_commands, keys_commands, model_commands, serve_command
from deploy.cli.client import chat_command, client_commands
from deploy.cli.measure import (
    bench_cluster_commands,
    bench_engine_commands,
    bench_load_commands,
    calibrate_command,
    plan_commands,
)
from deploy.cli.operate import (
    doctor_command,
    logs_command,
    node_commands,
    status_command,
    usage_command,
    why_command,
    worker_commands,
)
from deploy.cli.options.command_classes import BatonCommand, BatonGroup
from deploy.cli.options.command_line import complain
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.serve_command import ServeCommand

_OF_WORKERS = frozenset({"ray", "safetensors", "torch", "triton"})
"""Packages that the image of a router lacks, as does ``requirements/router.lock``."""
Commands = dict[str, Callable[..., Any] | typer.Typer]
"""Functions of commands, or groups of commands, by command name."""


def _group(
    help_text: str,
    panels: dict[str, Commands],
    *,
    completes: bool = False,
    moved: Mapping[str, str] = MappingProxyType({}),
) -> typer.Typer:
    """Make a group that shows its commands in these panels, in this order.

    ``completes``: true if the group has the options that install shell completion. ``moved`` gives,
    by the names of removed commands, the commands that replace them.
    """
    order = [name for commands in panels.values() for name in commands]

    class Ordered(BatonGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            # Typer itself lists groups after all commands.
            return order

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args[0] in moved:
                ctx.fail(f"`{ctx.command_path} {args[0]}` is now `{moved[args[0]]}`")
            return super().resolve_command(ctx, args)

    app = typer.Typer(
        cls=Ordered,
        help=help_text,
        no_args_is_help=True,
        add_completion=completes,
        pretty_exceptions_enable=False,
    )
    for panel, commands in panels.items():
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                kind = ServeCommand if command is serve_command.serve else BatonCommand
                app.command(name, cls=kind, rich_help_panel=panel)(command)
    return app


_MODEL = _group(
    "Download and list models.",
    {"Commands": {"list": model_commands.list_models, "pull": model_commands.pull}},
)
_KEYS = _group(
    "Manage API keys.",
    {
        "Commands": {
            "list": keys_commands.list_keys,
            "create": keys_commands.create,
            "rotate": keys_commands.rotate,
            "revoke": keys_commands.revoke,
        }
    },
)
_CERTS = _group(
    "Manage the TLS certificates of a cluster with a private CA.",
    {
        "Commands": {
            "show": certs_commands.show,
            "init": certs_commands.init,
            "issue": certs_commands.issue,
            "renew": certs_commands.renew,
        }
    },
)
_BENCH = _group(
    "Run benchmarks.",
    {
        "Measure a server": {
            "serve": bench_load_commands.serve,
            "goodput": bench_load_commands.goodput,
            "soak": bench_load_commands.soak,
        },
        "Measure this machine and a model": {
            "transfer": bench_cluster_commands.transfer,
            "quality": bench_engine_commands.quality,
        },
        "For Baton's developers": {
            "handoff": bench_cluster_commands.handoff,
            "peers": bench_cluster_commands.peers,
        },
    },
    moved={
        "grammar": "python -m loadtest.engine.grammar_bench",
        "index": "python -m loadtest.cluster.index_bench",
        "overload": "python -m loadtest.cluster.overload",
        "policy": "python -m loadtest.cluster.policy_bench",
        "router": "python -m loadtest.router.router_bench",
        "speculation": "python -m loadtest.engine.speculation",
        "tiers": "python -m loadtest.engine.tier_bench",
    },
)
app = _group(
    "Disaggregated LLM serving: prefill and decode run in separate pools of workers.\n\n"
    "Start with `baton serve`, and with `baton chat` in another terminal.",
    {
        "Serve": {
            "serve": serve_command.serve,
            "chat": chat_command.chat,
            "batch": client_commands.batch,
            "model": _MODEL,
            "router": node_commands.router,
            "worker": node_commands.worker,
            "join": node_commands.join,
        },
        "Operate": {
            "status": status_command.status,
            "logs": logs_command.logs,
            "usage": usage_command.usage,
            "why": why_command.why,
            "doctor": doctor_command.doctor,
            "drain": worker_commands.drain,
            "role": worker_commands.role,
            "scale": worker_commands.scale,
            "leave": node_commands.leave,
        },
        "Plan": {
            "plan": plan_commands.plan,
            "simulate": plan_commands.simulate,
            "calibrate": calibrate_command.calibrate,
        },
        "Measure": {"bench": _BENCH, "profile": bench_engine_commands.profile},
        "Security": {"keys": _KEYS, "certs": _CERTS},
    },
    completes=True,
)
# `up` is another name, as in Compose.
app.command("up", cls=ServeCommand, hidden=True)(serve_command.serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            is_eager=True,
            callback=_show_version,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the `baton` command."""
    # Python processes that it starts, by whatever library, import nothing of the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        app(prog_name="baton")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OF_WORKERS:
            raise
        complain(
            f"this needs the package {error.name}, which the image of a router lacks: use the image"
            " cpu or cuda, or another installation of the whole of Baton"
        )
        sys.exit(ExitCode.FAILED)
