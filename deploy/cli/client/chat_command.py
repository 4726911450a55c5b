"""`baton chat`: a conversation with the model, or one answer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from deploy.cli.operate.cluster_selection import ClusterId, cluster_of_client, cluster_of_grpc
from deploy.cli.options.command_line import (
    CONNECTION,
    DEFAULT_GRPC,
    INTERRUPTED,
    ApiKey,
    clear_errors,
    complain,
)
from deploy.cli.options.option_group import takes
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.cli.client.chat import Chat

MAX_TOKENS = 512
"""Default maximum number of tokens of an answer. If the context is smaller than twice this number,
the default is half of the context."""
_SIGNALED = 128
"""Offset of exit codes for signals. If a signal ends a process, a shell reports this plus the
signal's number."""


@takes(TlsOptions)
def chat(
    tls: TlsOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="Question to answer. Without it a conversation starts.")
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The router's gRPC address. Default: that of your cluster on this machine.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    cluster: ClusterId = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum tokens of an answer. Default: {MAX_TOKENS}."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sampling temperature; 0 takes the most likely token. Default: the model's own.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Random seed; the same seed gives the same answer. Default: a new one.",
        ),
    ] = None,
    api_key: ApiKey = "",
) -> None:
    """Chat with the model in the terminal.

    Ctrl-C ends an answer, Ctrl-D ends the conversation.

        baton chat
        baton chat "What is the capital of Japan?" --temperature 0

    In a pipe the output is plain text: the answers alone.
    """
    # gRPC would log lost connections into the conversation. The command reports them itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from rich.console import Console  # noqa: PLC0415

    from baton.client import Client  # noqa: PLC0415
    from baton.v1.sampling_pb2 import SamplingParameters  # noqa: PLC0415
    from deploy.cli.client.chat import Chat  # noqa: PLC0415

    if grpc is None:
        state = cluster_of_client(cluster, default=DEFAULT_GRPC)
    else:
        state = cluster_of_grpc(grpc, cluster)
    files = tls.files(state)
    address = grpc or (state.grpc if state is not None else DEFAULT_GRPC)
    console = Console()
    renders = console.is_terminal and not console.is_dumb_terminal
    with (
        _ended_by_sigterm() if renders else nullcontext(),
        clear_errors(),
        Client(address, api_key, tls=files) as client,
    ):
        model = client.models()[0]
        most = max_tokens or max(1, min(MAX_TOKENS, model.context_length // 2))
        sampling = SamplingParameters(max_tokens=most, temperature=temperature, seed=seed)
        conversation = Chat(client, sampling)
        if prompt is not None:
            if not _answer(conversation, prompt, console if renders else None):
                raise typer.Exit(INTERRUPTED)
        elif renders and sys.stdin.isatty():
            where = f"{model.id} at {address}"
            if state is not None:
                where += f", cluster {state.cluster_id}"
            _converse(conversation, console, where)
        else:
            _converse_plainly(conversation)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that the terminal's echo and cursor are restored."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(_SIGNALED + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _converse(chat: Chat, console: Console, where: str) -> None:
    from deploy.cli.client.chat_terminal import (  # noqa: PLC0415
        ChatTerminal,
        QuestionInput,
        history_file,
        keys_held_back,
        open_history,
    )

    history = open_history(history_file())
    with keys_held_back():
        console.print(where, style="bold", markup=False, highlight=False)
        console.print(
            "/help lists the commands. Ctrl-D ends the conversation.", style="dim", highlight=False
        )
        ChatTerminal(chat, QuestionInput(history), console, complain).run()


def _converse_plainly(chat: Chat) -> None:
    """Read and answer questions until the input ends, or until Ctrl-C at the prompt."""
    from baton.errors import BatonError  # noqa: PLC0415

    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt)
        except (EOFError, KeyboardInterrupt):
            return
        if not text.strip():
            continue
        try:
            _answer(chat, text, None)
        except BatonError as error:
            complain(error.message)


def _answer(chat: Chat, question: str, console: Console | None) -> bool:
    """Ask the question and show the answer, as plain text if ``console`` is None. Returns False if
    Ctrl-C ended the answer.

    Raises BatonError.
    """
    if console is not None:
        from deploy.cli.client.chat_terminal import show_answer  # noqa: PLC0415

        return show_answer(chat, question, console)
    try:
        return not chat.ask(question, lambda text: typer.echo(text, nl=False)).interrupted
    finally:
        typer.echo()
