"""Defines the compared servers: how each is started on the loopback address, and when it is
ready.

Each server has the options that a user would take from its documentation: continuous batching, no
speculation, 32 sequences.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from baton.errors import ConfigError, Unavailable
from loadtest.common.child_processes import (
    LOOPBACK,
    cores,
    free_port,
    last_lines,
    process_group,
    signals_interrupt,
)

SERVED_NAME = "m"
PEERS = {
    "baton": "Baton, bf16",
    "vllm": "vLLM, all cores",
    "vllm-one-core": "vLLM, one core",
    "vllm-small-steps": "vLLM, all cores, 256 tokens a step",
    "llamacpp": "llama.cpp, bf16",
    "baton-int8": "Baton, int8",
    "llamacpp-q8": "llama.cpp, Q8_0",
}
"""Names of the servers that can be compared, each with the title that tables show."""

Precision = Literal["bf16", "int8"]

_READY_S = 300.0
_PROBE_S = 5.0
_POLL_S = 0.1
_SEQUENCES = 32
_SEQUENCE_TOKENS = 4352
"""Context of every peer: room for the longest workload's prompt and answer."""
_THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "VLLM_")


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the servers' programs and of the model. A server whose program is None is not
    compared."""

    model: Path
    """Folder of the model in Hugging Face format."""
    vllm: Path | None = None
    llama_server: Path | None = None
    gguf: Path | None = None
    """File of the same model in bf16, in GGUF format."""
    gguf_q8: Path | None = None
    """File of the same model in Q8_0, in GGUF format."""
    baton: Path = field(default_factory=lambda: Path(sysconfig.get_path("scripts")) / "baton")
    baton_arguments: str = ""
    """Additional options of `baton serve`, in shell syntax."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server to measure: an LLM server in one configuration, on one port."""

    name: str
    precision: Precision
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server. It also gets those of this process, except the ones that
    set numbers of threads."""

    @property
    def title(self) -> str:
        return PEERS[self.name]

    @property
    def ours(self) -> bool:
        return self.name.startswith("baton")

    @property
    def base_url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def make_server(name: str, programs: Programs) -> Server:
    """Return a server by its name in ``PEERS``, on a free port.

    If the server cannot be started here, raises ConfigError, which names the missing part.
    """
    if name not in PEERS:
        raise ConfigError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    if name in ("baton", "baton-int8"):
        return _baton(name, programs)
    if name.startswith("vllm"):
        return _vllm(name, programs)
    return _llamacpp(name, programs)


@contextlib.contextmanager
def serving(server: Server, log: Path, *, ready_s: float = _READY_S) -> Iterator[float]:
    """Run ``server`` during the block. Wait until its /health returns 200, and yield the seconds
    that the start took.

    Raises Unavailable with the last lines of ``log`` if it ends or is not ready in time. SIGINT,
    SIGTERM and SIGHUP end it too, and then raise KeyboardInterrupt. Call it on the main thread.
    """
    began = time.monotonic()
    with signals_interrupt(), process_group(server.command, _environment(server), log) as process:
        _await_health(server, process, log, began + ready_s)
        yield time.monotonic() - began


def program_version(program: Path | None) -> str:
    """Return the output of ``PROGRAM --version``; empty if there is none."""
    if program is None:
        return ""
    try:
        said = subprocess.run(  # noqa: S603 - a program that the operator named
            [str(program), "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_plain_environment() | {"PATH": _path_with(program)},
            timeout=60.0,
            check=False,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # llama-server prints the version, then the compiler. vLLM may log first.
    named = next((line for line in lines if line.startswith("version")), "")
    return named.removeprefix("version:").strip() or (lines[-1] if lines else "")


def _baton(name: str, programs: Programs) -> Server:
    if not programs.baton.is_file():
        raise ConfigError(f"no program at {programs.baton}: install Baton with `make install`")
    port, grpc = free_port(), free_port()
    precision: Precision = "int8" if name == "baton-int8" else "bf16"
    # By default it would use speculation on CPUs, which no peer does.
    options = ["--drafter", "none"]
    options += ["--quantization", "int8"] if precision == "int8" else []
    command = [
        *(str(programs.baton), "serve", "--model", str(programs.model)),
        *("--served-model-name", SERVED_NAME),
        *("--http", f"{LOOPBACK}:{port}", "--grpc", f"{LOOPBACK}:{grpc}"),
        *options,
        *shlex.split(programs.baton_arguments),
    ]
    return Server(name, precision, tuple(command), port)


def _vllm(name: str, programs: Programs) -> Server:
    if programs.vllm is None:
        raise ConfigError("vLLM was not found: name its command with --vllm-bin")
    port, usable = free_port(), cores()
    bound = str(usable[-1]) if name == "vllm-one-core" else _core_list(usable)
    # Small chunks of prompts delay decoding less, and cost throughput.
    step_tokens = "256" if name == "vllm-small-steps" else "2048"
    command = (
        *(str(programs.vllm), "serve", str(programs.model)),
        *("--host", LOOPBACK, "--port", str(port), "--served-model-name", SERVED_NAME),
        *("--dtype", "bfloat16", "--max-model-len", str(_SEQUENCE_TOKENS), "--max-num-seqs", "64"),
        *("--max-num-batched-tokens", step_tokens, "--enable-prefix-caching"),
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_HOST_IP": LOOPBACK,
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": _path_with(programs.vllm),
    }
    return Server(name, "bf16", command, port, environment)


def _llamacpp(name: str, programs: Programs) -> Server:
    if programs.llama_server is None:
        raise ConfigError("llama.cpp was not found: name its server with --llama-server")
    quantized = name == "llamacpp-q8"
    model = programs.gguf_q8 if quantized else programs.gguf
    flag = "--gguf-q8" if quantized else "--gguf"
    if model is None:
        raise ConfigError(f"{PEERS[name]} needs its model file: name it with {flag}")
    if not model.is_file():
        raise ConfigError(f"{flag} {model} is not a file")
    port, threads = free_port(), str(len(cores()))
    command = (
        *(str(programs.llama_server), "-m", str(model), "--alias", SERVED_NAME),
        *("--host", LOOPBACK, "--port", str(port), "-t", threads, "-tb", threads),
        *("-np", str(_SEQUENCES), "-c", str(_SEQUENCES * _SEQUENCE_TOKENS)),
        *("-b", "2048", "-ub", "512", "-ngl", "0"),
    )
    return Server(name, "int8" if quantized else "bf16", command, port)


def _core_list(usable: Sequence[int]) -> str:
    """Return core numbers in vLLM's syntax: ``0-1``, or ``0,2`` if there are gaps."""
    first, last = usable[0], usable[-1]
    if last - first + 1 == len(usable) > 1:
        return f"{first}-{last}"
    return ",".join(map(str, usable))


def find_program(given: Path | None, name: str) -> Path | None:
    """Return the path of the program ``given``. If it is None, search ``name`` on the PATH, and
    return None if it is not there.

    Raises ConfigError if the given program does not exist.
    """
    if given is None:
        found = shutil.which(name)
        return None if found is None else Path(found)
    if not os.access(given, os.X_OK) or not given.is_file():
        raise ConfigError(f"{given} is not a program: check the path of {name}")
    return given.absolute()


def _plain_environment() -> dict[str, str]:
    """Return this process's environment variables without those that set numbers of threads. Add
    those that keep Hugging Face libraries and vLLM offline."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_THREAD_VARIABLES)
    }
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    return kept | dict.fromkeys(offline, "1")


def _environment(server: Server) -> dict[str, str]:
    return _plain_environment() | dict(server.environment)


def _path_with(program: Path) -> str:
    """Return a PATH that begins with the folder of vLLM's virtual environment, since vLLM starts
    tools from there by name.
    """
    return os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])


def _await_health(
    server: Server, process: subprocess.Popen[bytes], log: Path, deadline: float
) -> None:
    with httpx.Client(trust_env=False, timeout=_PROBE_S) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise Unavailable(
                    f"{server.title} ended with exit code {process.returncode} before it was"
                    f" ready. Its last lines:\n{last_lines(log)}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{server.base_url}/health").status_code == httpx.codes.OK:
                    return
            time.sleep(_POLL_S)
    raise Unavailable(f"{server.title} was not ready in time. Its last lines:\n{last_lines(log)}")
