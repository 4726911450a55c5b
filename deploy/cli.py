"""The command line, `baton`. Heavy imports wait for the command that needs them."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer

from deploy import (
    bench_cluster_commands,
    bench_engine_commands,
    bench_load_commands,
    bench_part_commands,
    calibrate_command,
    certs_commands,
    client_commands,
    doctor_command,
    keys_commands,
    model_commands,
    node_commands,
    plan_command,
    serve_command,
    simulate_command,
    worker_commands,
)

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys, in a file that holds their hashes.", no_args_is_help=True)
certs_app = typer.Typer(help="Certificates of a cluster of one's own.", no_args_is_help=True)
bench_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)

# In the order in which --help shows them.
app.command()(worker_commands.drain)
app.command()(worker_commands.role)
app.command()(worker_commands.scale)
app.command(cls=serve_command.ServeCommand)(serve_command.serve)
app.command("up", cls=serve_command.ServeCommand, hidden=True)(serve_command.serve)
app.command()(node_commands.join)
app.command()(node_commands.leave)
app.command()(node_commands.router)
app.command()(client_commands.chat)
app.command()(client_commands.batch)
app.command()(client_commands.status)
app.command()(bench_engine_commands.profile)
app.command()(simulate_command.simulate)
app.command()(plan_command.plan)
app.command()(calibrate_command.calibrate)
app.command()(doctor_command.doctor)
app.add_typer(model_app, name="model")
app.add_typer(keys_app, name="keys")
app.add_typer(certs_app, name="certs")
app.add_typer(bench_app, name="bench")
model_app.command()(model_commands.pull)
model_app.command("list")(model_commands.list_models)
keys_app.command()(keys_commands.create)
keys_app.command("list")(keys_commands.list_keys)
keys_app.command()(keys_commands.revoke)
keys_app.command()(keys_commands.rotate)
certs_app.command()(certs_commands.init)
certs_app.command()(certs_commands.renew)
certs_app.command()(certs_commands.issue)
certs_app.command()(certs_commands.show)
bench_app.command()(bench_load_commands.serve)
bench_app.command()(bench_load_commands.goodput)
bench_app.command()(bench_load_commands.soak)
bench_app.command()(bench_cluster_commands.peers)
bench_app.command()(bench_engine_commands.quality)
bench_app.command()(bench_part_commands.transfer)
bench_app.command()(bench_cluster_commands.handoff)
bench_app.command()(bench_engine_commands.speculation)
bench_app.command()(bench_part_commands.policy)
bench_app.command()(bench_cluster_commands.overload)
bench_app.command()(bench_part_commands.index)
bench_app.command()(bench_engine_commands.grammar)
bench_app.command()(bench_engine_commands.tiers)
bench_app.command()(bench_part_commands.router)


@app.command()
def version() -> None:
    """Show Baton's version."""
    typer.echo(installed_version("baton"))


def main() -> None:
    """The entry point of the `baton` command."""
    app()
