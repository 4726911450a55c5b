"""`baton serve`: a cluster from one command line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.options.command_classes import BatonCommand
from deploy.cli.options.command_line import clear_errors, fail, say
from deploy.cli.options.vllm_aliases import ACCEPTED, REFUSED, Accepted, Refused

if TYPE_CHECKING:
    from baton.config.cluster import Config
    from baton.config.sources import Flag

_OPTION = inspect.Parameter.KEYWORD_ONLY


class ServeCommand(BatonCommand):
    """A command whose options are made from the configuration's fields when they are needed.

    The configuration is slow to import. Contexts are ``Any`` here: typer does not export the type
    that its methods take.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: Any = None,
        **extra: Any,
    ) -> Any:
        """Parse the command line."""
        if not self.params:
            self.params = _parameters()
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. For an invalid value, report a usage error with Baton's own
        message."""
        from pydantic import ValidationError  # noqa: PLC0415

        from baton.config.errors import plain_requirement  # noqa: PLC0415

        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = plain_requirement(error.__cause__)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the options that most clusters need."""
        from deploy.cli.options.config_options import config_options  # noqa: PLC0415
        from deploy.cli.options.long_help import show_help  # noqa: PLC0415

        rare = {option.name for option in config_options() if not option.is_common}
        note = f"`{ctx.command_path} --help-all` also shows the options that few clusters need."
        show_help(self, ctx, leave_out=rare, note=note)

    def invoke(self, ctx: Any) -> Any:
        """Run ``serve``, which reads the options' values from the context."""
        assert self.callback is not None
        return ctx.invoke(self.callback)


def serve(ctx: typer.Context) -> None:
    """Serve a model until Ctrl-C.

    This starts everything that a cluster needs on this machine. With --ray-address the workers run
    on the machines of that Ray cluster.

        baton serve Qwen/Qwen3-0.6B --max-model-len 8192 --api-key-file keys.txt
        baton serve /models/Qwen3-8B --decode 2 --tensor-parallel-size 2

    vLLM's names of many options also work: docs/how-to/migrate-from-vllm.md lists them.

    Options take precedence over the environment (BATON_KV_DTYPE for --kv-dtype), and the
    environment over the file of --config. docs/reference/configuration.md lists all of them.
    """
    config = configuration(ctx.params)
    from baton.telemetry.logs import Service  # noqa: PLC0415
    from deploy.launcher.launcher import run_cluster  # noqa: PLC0415
    from deploy.processes.foreground import own_progress  # noqa: PLC0415

    progress = own_progress(
        config.log_to, config.log_level, config.log_format, Service.LAUNCHER, "launcher"
    )
    raise typer.Exit(run_cluster(config, progress))


def configuration(given: dict[str, Any]) -> Config:
    """Return the configuration from the command line, the environment and the file.

    Ends the command if a value is invalid. Removes ``VLLM_API_KEY`` from the environment.
    """
    from deploy.cli.options.api_key_file import keys_in, requiring, taken_from_environment  # noqa: PLC0415
    from deploy.cli.options.config_loading import load  # noqa: PLC0415

    keys = taken_from_environment()
    config = load(given["config"], list(_flags(given)))
    config = _with_address(config, given["host"], given["port"])
    with clear_errors():
        if given["api_key_file"] is not None:
            keys = (*keys, *keys_in(given["api_key_file"]))
        return requiring(config, keys)


def _flags(given: dict[str, Any]) -> Iterator[Flag]:
    """Yield the flags that the user gave, in the form that sets fields of the configuration."""
    from baton.config.sources import Flag  # noqa: PLC0415
    from deploy.cli.options.config_options import config_options  # noqa: PLC0415

    model = given["model_argument"]
    if model is not None:
        if given["model"] not in (None, model):
            raise typer.BadParameter(f"MODEL is {model!r} and --model is {given['model']!r}")
        yield Flag("MODEL", ("model",), model)
    for option in config_options():
        value = given[option.name]
        if value not in (None, (), []):
            yield option.given(value)


def _with_address(config: Config, host: str | None, port: int | None) -> Config:
    """Return ``config`` with ``--host`` and ``--port`` applied; each is a part of the field
    ``http``."""
    from baton.config.fields import split_host_port  # noqa: PLC0415

    if host is None and port is None:
        return config
    old_host, old_port = split_host_port(config.http)
    host = old_host if host is None else host.strip("[]")
    shown = f"[{host}]" if ":" in host else host
    http = f"{shown}:{old_port if port is None else port}"
    try:
        split_host_port(http)
    except ValueError as error:
        fail(f"--host: {error}")
    return config.model_copy(update={"http": http})


def _parameters() -> list[Any]:
    """Return all options, as typer makes them from a function's signature."""
    from deploy.cli.options.config_options import config_options, old_options  # noqa: PLC0415

    parameters = [
        _parameter("model_argument", str, _MODEL),
        _parameter("config", Path, _CONFIG),
        _parameter("host", str, typer.Option(hidden=True)),
        _parameter("port", int, typer.Option(min=0, max=65535, hidden=True)),
        *(option.parameter() for option in config_options()),
        _parameter("api_key_file", Path, _API_KEY_FILE),
        *map(_accepted, ACCEPTED),
        *map(_refused, (*REFUSED, *old_options())),
        _parameter("help_all", bool, _HELP_ALL),
    ]

    def options() -> None:
        """Do nothing: typer makes the options from the signature that is set on this function."""

    options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    options.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(options)
    return typer.main.get_command(app).params


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, _OPTION, default=None, annotation=Annotated[kind | None, option])


def _accepted(alias: Accepted) -> inspect.Parameter:
    def tell(value: bool | None) -> None:
        if value:
            say(f"note: {alias.flags[0]} has no effect: {alias.note}")

    option = typer.Option(*alias.flags, hidden=True, expose_value=False, callback=tell)
    return _parameter(_name_of(alias.flags[0]), bool, option)


def _refused(alias: Refused) -> inspect.Parameter:
    def refuse(value: Any) -> None:
        if value is not None and value is not False and value != alias.harmless:
            raise typer.BadParameter(alias.reason)

    option = typer.Option(*alias.flags, hidden=True, expose_value=False, callback=refuse)
    return _parameter(_name_of(alias.flags[0]), str if alias.takes_value else bool, option)


def _name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _show_all(ctx: typer.Context, wanted: bool | None) -> None:
    if wanted:
        from deploy.cli.options.long_help import show_help  # noqa: PLC0415

        assert isinstance(ctx.command, ServeCommand)
        show_help(ctx.command, ctx)
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show this message with all options and exit.",
)
_MODEL = typer.Argument(
    metavar="MODEL",
    help="Model to serve: a Hugging Face id (Qwen/Qwen3-0.6B), a folder of such a model, a .gguf"
    " file, or the demo model. Default: smollm2-135m-instruct, the demo model.",
    rich_help_panel="Model",
)
_API_KEY_FILE = typer.Option(
    metavar="FILE",
    help="File with an API key on each line; clients must then show one. It is read once, at the"
    " start.",
    rich_help_panel="Security",
)
_CONFIG = typer.Option(
    metavar="FILE", help="A TOML file; docs/reference/configuration.md has its fields."
)
