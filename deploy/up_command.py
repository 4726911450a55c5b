"""`baton up`: its options, and the configuration that they make."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.command_line import DEFAULT_GRPC, DEFAULT_HTTP, MOST_RANKS, MOST_WORKERS, fail

if TYPE_CHECKING:
    from pydantic import ValidationError

    from baton.config import Config, Role


def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="A name that `baton model list` shows, a Hugging Face folder, or a .gguf file. "
            "Default: smollm2-135m-instruct."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's id in the API. Default: its name, or the folder's."),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="How many prefill workers. Default: 1."),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="How many decode workers. Default: 1."),
    ] = None,
    prefill_tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Tensor parallelism: ranks, with a GPU each, of a prefill worker. Default: 1.",
        ),
    ] = None,
    decode_tp: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="The same of a decode worker. Default: 1."),
    ] = None,
    prefill_cp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Context parallelism: ranks, with all weights each, over which a prefill worker"
            " divides long prompts. Not with --prefill-tp. Default: 1.",
        ),
    ] = None,
    routers: Annotated[
        int | None,
        typer.Option(
            help="How many router processes share the two ports; 0, with --ray-address, leaves them"
            " to `baton router`. Default: 1."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"The HTTP front; port 0 takes a free one. Default: {DEFAULT_HTTP}.",
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"The gRPC front; port 0 takes a free one. Default: {DEFAULT_GRPC}.",
        ),
    ] = None,
    admin_http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Another HTTP front for metrics, console and operators, which the first one then"
            " has no more. Default: none.",
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="API keys that `baton keys` has made; one is then required. Default: none.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float32 or float16. Default: bfloat16."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Weights: auto (as the files hold them), none, or quantised at load: int8, int4 or"
            " fp8. Default: auto."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="The KV cache: auto (as --dtype), int8 or fp8. Default: auto."),
    ] = None,
    kv_host_mib: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Host memory of a worker for KV blocks that a GPU evicts, in MiB. Default: 0.",
        ),
    ] = None,
    kv_disk_mib: Annotated[
        int | None,
        typer.Option(
            min=0, help="Disk of a worker for KV blocks that memory evicts, in MiB. Default: 0."
        ),
    ] = None,
    kv_disk_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where these lie. Default: kv in Baton's cache."),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic",
            help="Same bits whatever else is in the batch; refused where that cannot be promised.",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="What guesses tokens that a decode step checks: ngram (where text repeats), draft"
            " (a smaller model), eagle, medusa (heads trained for the model), none, or auto: ngram"
            " on CPUs, none on GPUs. Answers are the same. Default: auto."
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="The smaller model of --drafter draft, which must have the same tokens, or the"
            " folder of the heads of --drafter eagle or medusa.",
        ),
    ] = None,
    certs: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Certificates that `baton certs init` has made: the fronts serve TLS, and routers"
            " and workers prove themselves to each other. Default: none, and no TLS.",
        ),
    ] = None,
    tls_certificate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Another certificate for the fronts (PEM). Default: of --certs."
        ),
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key (PEM).")] = None,
    client_authority: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Ask the fronts' clients for certificates of this authority (PEM): ca.pem of"
            " --certs, or another. Default: none are asked for.",
        ),
    ] = None,
    insecure_listen: Annotated[
        bool | None,
        typer.Option(
            "--insecure-listen",
            help="Listen beyond 127.0.0.1 although keys or TLS are missing: behind a proxy.",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help="How KV blocks travel between workers: auto (the best that both ends can use),"
            " shm, grpc, gloo, nccl, cuda_ipc or nixl. Default: auto."
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A Redis or Valkey server, redis://HOST:PORT/DB. Default: an embedded Valkey.",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="A Ray cluster that others have started, whose nodes have places for workers"
            " (`baton join`); auto: that of the node on this machine. Needs --redis-url. Default:"
            " a Ray of its own, on this machine alone.",
        ),
    ] = None,
    gcs_store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where Ray's control store keeps what it knows, so that its death costs nothing:"
            " embedded (a Valkey of its own) or redis://HOST:PORT. Default: nowhere.",
        ),
    ] = None,
    local_prefill: Annotated[
        str | None,
        typer.Option(
            help="Whether decode workers compute prompts themselves: auto (where that is predicted"
            " to be faster), never or always. Default: auto."
        ),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            help="What becomes of requests under too much load: queue lets them wait, slo refuses"
            " those whose first token would be late. Default: queue."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How a request's workers are chosen: predictive, round_robin, least_loaded,"
            " prefix, power_of_two or session. Default: predictive."
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where traces of requests are sent, by OTLP over gRPC: http://HOST:4317."
            " Default: nowhere.",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="How log lines look: text or json. Default: text."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file. Default: none."),
    ] = None,
) -> None:
    """Bring a cluster up, on this machine unless --ray-address says more, and serve until Ctrl-C.

    Flags override the environment (BATON_...), which overrides the configuration file.
    """
    settings = load(
        config,
        model=model,
        served_model_name=served_model_name,
        routers=routers,
        http=http,
        grpc=grpc,
        admin_http=admin_http,
        keys_file=None if keys_file is None else str(keys_file.absolute()),
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        kv_host_mib=kv_host_mib,
        kv_disk_mib=kv_disk_mib,
        kv_disk_path=kv_disk_path,
        deterministic=deterministic,
        drafter=drafter,
        draft_model=draft_model,
        tls=_tls(
            folder=certs,
            certificate=tls_certificate,
            key=tls_key,
            client_authority=client_authority,
        ),
        insecure_listen=insecure_listen,
        transport=transport,
        redis_url=redis_url,
        ray_address=ray_address,
        gcs_store=gcs_store,
        local_prefill=local_prefill,
        admission=admission,
        policy=policy,
        otlp_endpoint=otlp_endpoint,
        log_format=log_format,
    )
    settings = _with_pool(settings, "prefill", count=prefill, tp=prefill_tp, cp=prefill_cp)
    settings = _with_pool(settings, "decode", count=decode, tp=decode_tp)
    settings = _checked(settings)
    from deploy.launcher import run_cluster  # noqa: PLC0415
    from deploy.progress import Progress  # noqa: PLC0415

    raise typer.Exit(run_cluster(settings, Progress(Console())))


def load(file: Path | None, **flags: Any) -> Config:
    """The configuration; ends the command where it is at fault, and says every fault."""
    from pydantic import ValidationError  # noqa: PLC0415
    from pydantic_settings import SettingsError  # noqa: PLC0415

    from baton.config import load_config  # noqa: PLC0415

    try:
        return load_config(file, **flags)
    except ValidationError as error:
        fail(*_faults(error))
    except tomllib.TOMLDecodeError as error:
        fail(f"{file}: {error}")
    except (OSError, SettingsError) as error:
        fail(str(error))


def _tls(**flags: str | None) -> dict[str, str] | None:
    """Beside what file and environment say."""
    given = {name: value for name, value in flags.items() if value is not None}
    return given or None


def _faults(error: ValidationError) -> list[str]:
    """One line a field."""
    lines = []
    for fault in error.errors():
        field = ".".join(map(str, fault["loc"])) or "configuration"
        message = fault["msg"].removeprefix("Value error, ")
        given = fault["input"]
        shown = f" (got {given!r})" if isinstance(given, str | int | float) else ""
        lines.append(f"{field}: {message}{shown}")
    return lines


def _with_pool(
    config: Config, role: Role, *, count: int | None, tp: int | None, cp: int | None = None
) -> Config:
    given = {"count": count, "tp": tp, "cp": cp}
    update = {name: value for name, value in given.items() if value is not None}
    if not update:
        return config
    pools = [pool for pool in config.pools if pool.role == role]
    if len(pools) != 1:
        names = ", ".join(pool.name for pool in pools)
        first = next(iter(update))
        flag = f"--{role}" if first == "count" else f"--{role}-{first}"
        fail(f"{flag} needs a single {role} pool; there are {names}: set them in a file instead")
    changed = pools[0].model_copy(update=update)
    others = tuple(changed if pool is pools[0] else pool for pool in config.pools)
    return config.model_copy(update={"pools": others})


def _checked(config: Config) -> Config:
    """What flags have changed of the pools, checked with all else."""
    try:
        config.check_ranks()
    except ValueError as error:
        fail(str(error))
    return config
