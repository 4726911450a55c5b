"""The command line, `baton`. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import functools
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from deploy import calibrate_command, simulate_command, worker_commands

if TYPE_CHECKING:
    from pydantic import ValidationError

    from baton.config import Config, Role
    from deploy.cluster_state import ClusterState

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.command()(worker_commands.drain)
app.command()(worker_commands.role)
app.command()(worker_commands.scale)
app.command()(simulate_command.simulate)
app.command()(calibrate_command.calibrate)
bench_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

_DEFAULT_HTTP = "127.0.0.1:8000"
_DEFAULT_GRPC = "127.0.0.1:8001"
_MOST_WORKERS = 1024
_COULD_NOT_RUN = 2


def main() -> None:
    """The entry point of the `baton` command."""
    app()


@app.command()
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
        typer.Option(min=1, max=_MOST_WORKERS, help="How many prefill workers. Default: 1."),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_WORKERS, help="How many decode workers. Default: 1."),
    ] = None,
    routers: Annotated[
        int | None,
        typer.Option(help="How many router processes share the two ports. Default: 1."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"The HTTP front; port 0 takes a free one. Default: {_DEFAULT_HTTP}.",
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"The gRPC front; port 0 takes a free one. Default: {_DEFAULT_GRPC}.",
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
    policy: Annotated[
        str | None,
        typer.Option(
            help="How a request's workers are chosen: predictive, round_robin, least_loaded,"
            " prefix, power_of_two or session. Default: predictive."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file. Default: none."),
    ] = None,
) -> None:
    """Bring a cluster up on this machine and serve until Ctrl-C.

    Flags override the environment (BATON_...), which overrides the configuration file.
    """
    settings = _load(
        config,
        model=model,
        served_model_name=served_model_name,
        routers=routers,
        http=http,
        grpc=grpc,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        kv_host_mib=kv_host_mib,
        kv_disk_mib=kv_disk_mib,
        kv_disk_path=kv_disk_path,
        deterministic=deterministic,
        drafter=drafter,
        draft_model=draft_model,
        transport=transport,
        redis_url=redis_url,
        gcs_store=gcs_store,
        local_prefill=local_prefill,
        policy=policy,
    )
    settings = _with_count(settings, "prefill", prefill)
    settings = _with_count(settings, "decode", decode)
    from deploy.launcher import run_cluster  # noqa: PLC0415
    from deploy.progress import Progress  # noqa: PLC0415

    raise typer.Exit(run_cluster(settings, Progress(Console())))


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; without it, a conversation begins.")
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The router's gRPC front. Default: that of the cluster on this machine.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer. Default: 512.", show_default=False)
    ] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most likely token. Default: 1.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same answer. Default: drawn.")
    ] = None,
) -> None:
    """Stream answers in the terminal. Ctrl-C ends an answer; Ctrl-D ends the conversation."""
    from baton.client import Client  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from baton.v1.sampling_pb2 import SamplingParameters  # noqa: PLC0415
    from deploy.chat import INTERRUPTED, Chat, converse  # noqa: PLC0415

    cluster = _local_cluster()
    address = grpc or (cluster.grpc if cluster is not None else _DEFAULT_GRPC)
    sampling = SamplingParameters(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Client(address) as client:
        session = Chat(client, sampling, lambda text: typer.echo(text, nl=False))
        try:
            client.list_models()
            if prompt is None:
                converse(session, _complain)
            elif not session.ask(prompt):
                raise typer.Exit(INTERRUPTED)
        except BatonError as error:
            _fail(error.message)


@app.command()
def batch(
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, help="Requests, one in a line, as OpenAI's batches."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where answers go; lines without one go to FILE with .errors in its name."
            " Default: beside the input, .results.jsonl.",
        ),
    ] = None,
    batch_id: Annotated[
        str, typer.Option("--id", help="Go on with a batch that was begun, instead of a file.")
    ] = "",
    window: Annotated[
        str, typer.Option(help="The batch ends after this time with what there is.")
    ] = "24h",
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The router's HTTP front. Default: that of the cluster on this machine.",
        ),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="BATON_API_KEY", help="Where the cluster asks for one.")
    ] = "",
) -> None:
    """Run a file of requests in the slack that other traffic leaves, and wait for the results.

    Exit code 0: all lines were answered; 3: not all; 1: it could not be run. Ctrl-C leaves the
    batch running.
    """
    from baton.client import HttpClient  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.batch_command import BatchCommand, run_batch  # noqa: PLC0415

    if (file is None) == (not batch_id):
        _fail("give a file, or --id and a batch's id")
    cluster = _local_cluster(http)
    address = http or (cluster.http if cluster is not None else _DEFAULT_HTTP)
    with HttpClient(f"http://{address}", api_key) as client:
        command = BatchCommand(
            client, lambda text: typer.echo(text, err=True), Console(stderr=True)
        )
        try:
            code = run_batch(command, file, batch_id, window, output)
        except (BatonError, OSError) as error:
            _fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def status(
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The router's HTTP front. Default: that of the cluster on this machine.",
        ),
    ] = None,
) -> None:
    """Show the router's health and what each worker does; exit code 1 when it is not healthy."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.status import pairs_table, read_status, slots_table, table  # noqa: PLC0415

    cluster = _local_cluster(http)
    address = http or (cluster.http if cluster is not None else _DEFAULT_HTTP)
    try:
        found = read_status(address, cluster)
    except BatonError as error:
        _fail(error.message)
    console = Console()
    console.print(f"router {found.http}: {found.health}", markup=False, highlight=False)
    if found.supervisor:
        console.print(f"supervisor: {found.supervisor}", markup=False, highlight=False)
    console.print(table(found))
    if found.slots:
        console.print()
        console.print(slots_table(found))
    if found.pairs:
        console.print()
        console.print(pairs_table(found))
    raise typer.Exit(0 if found.healthy else 1)


@model_app.command("pull")
def model_pull(
    name: Annotated[str, typer.Argument(help="A name that `baton model list` shows.")] = (
        "smollm2-135m-instruct"
    ),
) -> None:
    """Get a model, so that later starts need no network."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415

    try:
        # As a start without --quantization wants it; other forms are made of it without a network.
        path = model_store.pull(name, lambda text: typer.echo(text, err=True), "auto")
    except BatonError as error:
        _fail(error.message)
    typer.echo(path)


@model_app.command("list")
def model_list() -> None:
    """List the models that can be pulled and those that are here."""
    from rich.table import Table  # noqa: PLC0415

    from deploy import model_store  # noqa: PLC0415

    drawn = Table("name", "here", "MiB", "source", "path", box=None, pad_edge=False)
    drawn.columns[-1].overflow = "fold"
    for entry in model_store.list_models():
        here, size = ("yes", f"{entry.size / (1 << 20):.0f}") if entry.cached else ("no", "")
        drawn.add_row(entry.name, here, size, entry.source, str(entry.path or ""))
    Console().print(drawn)


@bench_app.command("peers")
def bench_peers(
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    vllm_bin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="vLLM's command: the client, and a peer. Default: `vllm` on the path.",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="llama.cpp's server. Default: the one on the path."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model for llama.cpp in bf16.")
    ] = None,
    gguf_q8: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model for llama.cpp in Q8_0.")
    ] = None,
    workloads: Annotated[
        str, typer.Option(help="Out of a,b,c,d,e,s (docs/performance.md).")
    ] = "a,b,c,d",
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each workload.")] = 3,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Out of baton, vllm, vllm-one-core, llamacpp, baton-int8, llamacpp-q8."
            " Default: all, the last two if --gguf-q8 is given."
        ),
    ] = None,
    alternate: Annotated[
        bool, typer.Option("--alternate", help="Start every server afresh for each repetition.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run's prompts.")] = 1,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every run there, as JSON.")
    ] = None,
    baton_args: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for `baton up`.")
    ] = "",
) -> None:
    """Start Baton and other servers in turn, drive each with `vllm bench serve`, print ratios."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.peer_servers import Programs, find_program  # noqa: PLC0415
    from loadtest.peers import Comparison, default_peers, run_comparison  # noqa: PLC0415
    from loadtest.workload import choose_workloads  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        programs = Programs(
            model=model_store.resolve(model, say).path,
            vllm=find_program(vllm_bin, "vllm"),
            llama_server=find_program(llama_server, "llama-server"),
            gguf=gguf,
            gguf_q8=gguf_q8,
            baton_arguments=baton_args,
        )
        comparison = Comparison(
            _names(peers) if peers is not None else default_peers(programs),
            choose_workloads(_names(workloads)),
            repetitions,
            alternate,
            seed,
        )
        run_comparison(comparison, programs, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def profile(
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    quantization: Annotated[
        str, typer.Option(help="As for `baton up`: auto, none, int8, int4 or fp8.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As for `baton up`: auto, int8 or fp8.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")
    ] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, help="Compute threads on the CPU; 0 takes one for each core.")
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 1024,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in the cache of each sequence that decodes.")
    ] = 1024,
    batches: Annotated[str, typer.Option(help="Sequences that decode at a time.")] = "1,8,32",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace there, for chrome://tracing or Perfetto."),
    ] = None,
) -> None:
    """Prefill and decode steps of one engine, without a cluster, against the machine's limits."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from engine.engine import EngineSettings  # noqa: PLC0415
    from loadtest.profile import ProfileSettings, draw, profile_engine  # noqa: PLC0415
    from loadtest.whole_table import print_whole  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        path = model_store.resolve(model, say, quantization).path
        engine = EngineSettings(
            path,
            dtype=dtype,
            device=device,
            threads=threads,
            quantization=quantization,
            kv_dtype=kv_dtype,
        )
        sizes = _counts(batches)
        settings = ProfileSettings(engine, prompt_tokens, context_tokens, sizes, output)
        found = profile_engine(settings, say)
    except BatonError as error:
        _fail(error.message)
    print_whole(Console(), draw(found))


@bench_app.command("quality")
def bench_quality(
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", help="A text, or a .jsonl file whose rows have `turns`."),
    ],
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    quantizations: Annotated[
        str,
        typer.Option(
            help="Out of none,int8,int4,fp8,auto, each perhaps with a KV type, as in none/int8;"
            " compared with the first."
        ),
    ] = "none,int8,int4,auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")
    ] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, help="Compute threads on the CPU; 0 takes one for each core.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Where the text is cut.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are computed together.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each compared answer.")] = 64,
) -> None:
    """Perplexity and greedy agreement of a model's quantisations, without a cluster."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from engine.engine import Engine, EngineSettings, build_engine  # noqa: PLC0415
    from loadtest.quality import (  # noqa: PLC0415
        Candidate,
        QualitySettings,
        draw,
        measure,
        read_tokens,
    )
    from loadtest.whole_table import print_whole  # noqa: PLC0415

    def say(line: str) -> None:
        typer.echo(line, err=True)

    def build(name: str) -> Engine:
        quantization, _, kv_dtype = name.partition("/")
        path = model_store.resolve(model, say, quantization).path
        settings = EngineSettings(
            path,
            dtype=dtype,
            device=device,
            threads=threads,
            quantization=quantization,
            kv_dtype=kv_dtype or "auto",
        )
        return build_engine(settings)

    names = _names(quantizations)
    if not names:
        _fail("--quantizations names none")
    try:
        first = names[0].partition("/")[0]
        tokenizer = model_store.resolve(model, say, first).path / "tokenizer.json"
        found = measure(
            [Candidate(name, functools.partial(build, name)) for name in names],
            read_tokens(text, tokenizer),
            QualitySettings(tokens, window, answer=answer),
            say,
        )
    except BatonError as error:
        _fail(error.message)
    print_whole(Console(), draw(found))


@bench_app.command("transfer")
def bench_transfer(
    transport: Annotated[
        str, typer.Option(help="Out of shm,grpc,gloo,nixl. Default: those that work here.")
    ] = "shm,grpc,gloo,nixl",
    block_bytes: Annotated[
        int,
        typer.Option(min=64, help="A multiple of 64. Default: the demo model's, 360 KiB."),
    ] = 360 << 10,
    most: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="The largest size. Default: 1024.")
    ] = 1024,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Of the largest sizes; smaller ones are moved oftener.")
    ] = 5,
    model: Annotated[
        str | None,
        typer.Option(
            help="For the cost of an empty handoff, as for `baton up`; `none` leaves it out."
            " Default: smollm2-135m-instruct."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Speed of each transport from one block to 1 GiB, against limits of the same run."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.empty_handoff import EMPTY_PER_REPETITION, EmptySettings  # noqa: PLC0415
    from loadtest.transfer_bench import TransferSettings, bench_transfers  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        empty = None
        if model != "none":
            found = model_store.resolve(model or "smollm2-135m-instruct", say, "auto")
            handoffs = EMPTY_PER_REPETITION * repetitions
            empty = EmptySettings(found.path, found.name, handoffs=handoffs)
        settings = TransferSettings(_names(transport), block_bytes, most << 20, repetitions)
        bench_transfers(settings, empty, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("handoff")
def bench_handoff(
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    transport: Annotated[
        str, typer.Option(help="Out of shm,grpc,gloo,nixl; a cluster for each.")
    ] = "shm,grpc",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 1024,
    answer_tokens: Annotated[
        int, typer.Option(min=3, help="Length of the answers that are handed off.")
    ] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 15,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """What handing over adds to the first and the second token, in a cluster of its own."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.handoff_bench import HandoffSettings, bench_handoffs  # noqa: PLC0415
    from loadtest.peer_servers import Programs  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        settings = HandoffSettings(_names(transport), prompt_tokens, answer_tokens, repetitions)
        bench_handoffs(settings, programs, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("speculation")
def bench_speculation(
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Has .jsonl files of `category` and `turns`. Default: tasks of copying alone.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    quantization: Annotated[
        str, typer.Option(help="Weights, as for `baton up`: auto, none, int8, int4 or fp8.")
    ] = "auto",
    drafter: Annotated[str, typer.Option(help="What is compared with none.")] = "ngram",
    draft_model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="As for `baton up`."),
    ] = "",
    categories: Annotated[
        str, typer.Option(help="Out of those of the files, and copy. Default: all.")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Sequences at a time.")] = "1,4,16",
    rows: Annotated[
        int, typer.Option(min=1, help="Prompts of a category, or twice the concurrency.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="How often both ways are run.")] = 2,
    threads: Annotated[
        int, typer.Option(min=0, help="Compute threads; 0 takes one for each core.")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Tokens a second with and without drafts, of one engine on the CPU, without a cluster."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from deploy.drafter_folder import drafter_folder  # noqa: PLC0415
    from engine.engine import EngineSettings  # noqa: PLC0415
    from loadtest.speculation import SpeculationSettings  # noqa: PLC0415
    from loadtest.speculation import bench_speculation as run_bench  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        engine = EngineSettings(
            model_store.resolve(model, say, quantization).path,
            device="cpu",
            threads=threads,
            quantization=quantization,
            drafter=drafter,
            draft_model=drafter_folder(drafter, draft_model, say) if draft_model else None,
        )
        settings = SpeculationSettings(
            engine,
            prompts,
            _names(categories),
            _counts(concurrency),
            rows,
            tokens,
            temperature,
            repeats,
        )
        run_bench(settings, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("policy")
def bench_policy(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="In Mooncake's format, plain or gzipped.")
    ],
    workers: Annotated[
        int, typer.Option(min=1, max=_MOST_WORKERS, help="Prefill workers.", show_default=True)
    ] = 4,
    scale_length: Annotated[
        float, typer.Option(help="Divides the lengths of prompts and blocks.")
    ] = 1.0,
    cache_blocks: Annotated[
        int | None, typer.Option(min=1, help="Most blocks in a worker's cache. Default: no bound.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block of the trace.")] = 512,
    routers: Annotated[
        int, typer.Option(min=1, max=64, help="Routers that take requests in turns.")
    ] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help="predictive, round_robin, least_loaded, prefix, power_of_two or session."
        ),
    ] = "predictive",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Replay a trace through the router's policy and prefix index, without models."""
    from typing import cast, get_args  # noqa: PLC0415

    from baton.config import PolicyName  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from loadtest.policy_bench import PolicyBenchSettings  # noqa: PLC0415
    from loadtest.policy_bench import bench_policy as bench  # noqa: PLC0415

    if policy not in get_args(PolicyName):
        _fail(f"--policy: {policy!r} is none of {', '.join(get_args(PolicyName))}")
    if not 0 < scale_length < float("inf"):
        _fail(f"--scale-length: {scale_length} is not above 0")
    settings = PolicyBenchSettings(
        trace, workers, cast(PolicyName, policy), scale_length, cache_blocks, block_tokens, routers
    )
    try:
        bench(settings, lambda text: typer.echo(text, err=True), Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("overload")
def bench_overload(
    trace: Annotated[
        Path,
        typer.Option(metavar="FILE", help="As Azure publishes them: CSV, plain or .gz."),
    ],
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    scale_length: Annotated[float, typer.Option(min=1, help="Lengths are divided by it.")] = 8.0,
    factor: Annotated[
        float, typer.Option(min=1, help="What is offered, over the measured capacity.")
    ] = 3.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long that is offered.")] = 60.0,
    probe_seconds: Annotated[
        float, typer.Option(min=1, help="How long each rate is, to find the capacity.")
    ] = 20.0,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Goodput of a cluster of its own when a multiple of its capacity is asked of it."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.overload import OverloadSettings  # noqa: PLC0415
    from loadtest.overload import bench_overload as run_bench  # noqa: PLC0415
    from loadtest.peer_servers import Programs  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        settings = OverloadSettings(trace, scale_length, factor, seconds, probe_seconds)
        run_bench(settings, programs, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("index")
def bench_index(
    workers: Annotated[int, typer.Option(min=1, max=65535, help="Workers in the index.")] = 1000,
    blocks: Annotated[
        int, typer.Option(min=1, help="(block, worker) pairs in the index.")
    ] = 10_000_000,
    rate: Annotated[float, typer.Option(min=1, help="Lookups a second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they are measured.")] = 20.0,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Lookups of 256-block prompts in a prefix index of a given size, and its memory."""
    from baton.errors import BatonError  # noqa: PLC0415
    from loadtest.index_bench import IndexSettings  # noqa: PLC0415
    from loadtest.index_bench import bench_index as run_bench  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        run_bench(IndexSettings(workers, blocks, rate, seconds), say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("grammar")
def bench_grammar(
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind, at each size.")] = 100,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """What following a JSON schema costs the steps of one engine."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.grammar_bench import GrammarBenchSettings  # noqa: PLC0415
    from loadtest.grammar_bench import bench_grammar as run_bench  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        path = model_store.resolve(model, say, "auto").path
        run_bench(GrammarBenchSettings(path, steps=steps, output=output), say, Console())
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("tiers")
def bench_tiers(
    model: Annotated[
        str,
        typer.Option(help="As for `baton up`. Default: smollm2-135m-instruct.", show_default=False),
    ] = "smollm2-135m-instruct",
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of a prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts that come back, of each kind.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="On the disk to measure. Default: a temporary one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """How soon a prompt begins whose KV is computed, in the pool, in host memory, or on disk."""
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.tier_bench import TierBenchSettings  # noqa: PLC0415
    from loadtest.tier_bench import bench_tiers as run_bench  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        path = model_store.resolve(model, say, "auto").path
        settings = TierBenchSettings(path, prompt_tokens, rounds, folder, output)
        run_bench(settings, say, Console())
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench_app.command("router")
def bench_router(
    model: Annotated[
        str,
        typer.Option(
            help="Whose tokenizer is used, as for `baton up`. Default: smollm2-135m-instruct.",
            show_default=False,
        ),
    ] = "smollm2-135m-instruct",
    rate: Annotated[
        float, typer.Option(min=1, help="Requests a second, while latencies are measured.")
    ] = 200.0,
    requests: Annotated[int, typer.Option(min=100, help="How many of them.")] = 2000,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of a prompt.")] = 100,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of their answers.")] = 16,
    step_ms: Annotated[
        float, typer.Option(min=0, help="Between an answer's tokens; 0 tells all at once.")
    ] = 10.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Open answers, while tokens a second are measured.")
    ] = 128,
    tokens_per_s: Annotated[
        str, typer.Option(help="Rates that are tried, until the router falls behind.")
    ] = "10000,15000,20000,25000,30000,40000,50000",
    peer: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Measure another router too, which passes HTTP on: its command, with {backend}"
            " (a URL) and {port} in it. Default: none.",
            show_default=False,
        ),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """What a router on one core adds to a request, and how many tokens a second it passes on.

    The worker behind it echoes: no model runs, and the first token comes at once.
    """
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy import model_store  # noqa: PLC0415
    from loadtest.router_bench import RouterBenchSettings  # noqa: PLC0415
    from loadtest.router_bench import bench_router as measure_router  # noqa: PLC0415

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        settings = RouterBenchSettings(
            model_store.resolve(model, say, "auto").path,
            rate=rate,
            requests=requests,
            prompt_words=prompt_words,
            answer_tokens=answer_tokens,
            step_s=step_ms / 1e3,
            streams=streams,
            tokens_per_s=_counts(tokens_per_s),
            peer=peer,
        )
        measure_router(settings, say, Console(), output)
    except BatonError as error:
        _fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def doctor(
    nccl: Annotated[
        bool,
        typer.Option("--nccl", help="Move blocks between two GPUs over NCCL, and abort; GB/s."),
    ] = False,
) -> None:
    """Show what of Baton can run on this machine; exit code 1 when something needed is missing.

    With --nccl the exit code is 2 where there are fewer than two GPUs.
    """
    from deploy import doctor as examination  # noqa: PLC0415

    if nccl:
        _check_nccl()
        return
    findings = examination.examine(examination.CHECKS)
    Console().print(examination.draw(findings), markup=False, highlight=False)
    raise typer.Exit(0 if examination.is_fit(findings) else 1)


@app.command()
def version() -> None:
    """Show Baton's version."""
    typer.echo(installed_version("baton"))


def _check_nccl() -> None:
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.doctor import draw_steps, nccl_devices  # noqa: PLC0415
    from deploy.pair_check import check_pair  # noqa: PLC0415

    try:
        devices = nccl_devices()
    except BatonError as error:
        _complain(error.message)
        raise typer.Exit(_COULD_NOT_RUN) from None
    try:
        Console().print(draw_steps(check_pair("nccl", devices)))
    except BatonError as error:
        _fail(error.message)


def _load(file: Path | None, **flags: Any) -> Config:
    from pydantic import ValidationError  # noqa: PLC0415
    from pydantic_settings import SettingsError  # noqa: PLC0415

    from baton.config import load_config  # noqa: PLC0415

    try:
        return load_config(file, **flags)
    except ValidationError as error:
        _fail(*_faults(error))
    except tomllib.TOMLDecodeError as error:
        _fail(f"{file}: {error}")
    except (OSError, SettingsError) as error:
        _fail(str(error))


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


def _with_count(config: Config, role: Role, count: int | None) -> Config:
    if count is None:
        return config
    pools = [pool for pool in config.pools if pool.role == role]
    if len(pools) != 1:
        names = ", ".join(pool.name for pool in pools)
        _fail(f"--{role} needs a single {role} pool; there are {names}: set their counts instead")
    counted = pools[0].model_copy(update={"count": count})
    changed = tuple(counted if pool is pools[0] else pool for pool in config.pools)
    return config.model_copy(update={"pools": changed})


def _names(text: str) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts(text: str) -> tuple[int, ...]:
    """The whole numbers of a list with commas."""
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        _fail(f"{text!r} is no list of whole numbers, as in 1,8,32")


def _local_cluster(http: str | None = None) -> ClusterState | None:
    """The newest cluster that runs here, or the one at ``http``."""
    from deploy.cluster_state import running_clusters  # noqa: PLC0415

    clusters = running_clusters()
    return next((state for state in clusters if http in (None, state.http)), None)


def _complain(*lines: str) -> None:
    for line in lines:
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)


def _fail(*lines: str) -> NoReturn:
    _complain(*lines)
    raise typer.Exit(1)
