"""Tries what a release consists of: installs it in empty environments and uses it there."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.version import VERSION
from tools.release.build import environment, run, wheel_files
from tools.release.trees import Files

IMPORT_S = 0.3
"""Maximum time of ``import baton.client``, in seconds of CPU time. CPU time is used because other
processes do not add to it."""
_IMPORT = """
import sys, time
begin = time.process_time()
import baton.client
print(time.process_time() - begin, *{"torch", "ray", "triton", "numpy"} & sys.modules.keys())
"""
_ASK = """
import sys
from baton.client import Client, Message, Sampling
with Client(sys.argv[1]) as client:
    question = [Message("user", "What is the capital of Japan?")]
    print(client.chat(question, sampling=Sampling(temperature=0, max_tokens=32)).text)
"""
_TRIES = 5
_START_S, _END_S, _POLL_S = 600.0, 120.0, 0.5
_HOSTILE = "raise SystemExit('a module of the current folder was imported')\n"
_PACKAGES, _MODULES = ("worker", "deploy", "baton"), ("router", "engine", "planning")


def try_client(python: str, wheel: Path, folder: Path) -> Path:
    """Install the client's wheel in an empty environment and import it. Returns the environment's
    Python."""
    own = _environment(python, folder)
    run(own, "-m", "pip", "install", "--quiet", wheel)
    run(own, "-m", "pip", "check")
    found = [run(own, "-P", "-c", _IMPORT).split() for _ in range(_TRIES)]
    seconds = min(float(words[0]) for words in found)
    heavy = found[0][1:]
    if heavy or seconds > IMPORT_S:
        raise SystemExit(
            f"import baton.client takes {seconds:.2f} s of CPU time, at most {IMPORT_S} s are"
            f" allowed; it imports {heavy or 'nothing heavy'}"
        )
    version = run(own, "-c", "import sys; print(sys.version.split()[0])").strip()
    print(f"client: Python {version}, imported in {seconds:.2f} s of CPU time")  # noqa: T201
    return own


def try_application(wheels: Sequence[Path], client: Path, folder: Path, python: str) -> None:
    """Install both wheels next to this Python's packages, run `baton serve`, and send it a question
    through the Python ``client``.

    The server is started in a folder that has modules with the names of Baton's own.
    """
    own = _environment(python, folder / "venv")
    # A .pth folder comes after the environment's own packages in the import path. Requirements are
    # imported from there, and Baton from its new wheels.
    packages = run(own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "requirements.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(own, "-m", "pip", "install", "--quiet", "--no-deps", *wheels)
    hostile = folder / "hostile"
    for package in _PACKAGES:
        (hostile / package).mkdir(parents=True)
        (hostile / package / "__init__.py").write_text(_HOSTILE)
    for module in _MODULES:
        (hostile / f"{module}.py").write_text(_HOSTILE)
    baton = own.with_name("baton")
    shown = run(baton, "--version", cwd=hostile).strip()
    if shown != f"baton {VERSION}":
        raise SystemExit(f"baton --version shows {shown!r}: the version is {VERSION}")
    with _served(baton, hostile) as address:
        answer = run(client, "-P", "-c", _ASK, address, cwd=hostile)
    if "Tokyo" not in answer:
        raise SystemExit(f"the demo model does not know the capital of Japan: {answer!r}")
    print(f"application: {shown}, answered {answer.strip()!r}")  # noqa: T201


def try_image_context(context: Path, files: Files, folder: Path, python: str) -> None:
    """Build the images' wheel from their context alone, as the Dockerfile does."""
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", folder, context)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    if (held := wheel_files(wheel)) != files:
        raise SystemExit(f"the images' build context: these files differ: {sorted(held ^ files)}")


def _environment(python: str, folder: Path) -> Path:
    """Make a virtual environment, and return the path of its Python."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


@contextlib.contextmanager
def _served(baton: Path, folder: Path) -> Iterator[str]:
    """Run `baton serve` in ``folder``, with the demo model. Yields host:port of its gRPC API."""
    http, grpc = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    log = folder.with_name("serve.log")
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the program that was just installed
            [str(baton), "serve", "--http", http, "--grpc", grpc],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
        )
    try:
        until = time.monotonic() + _START_S
        while not _is_ready(http):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"baton serve does not start:\n{log.read_text()}")
            time.sleep(_POLL_S)
        yield grpc
        process.terminate()
        if code := process.wait(_END_S):
            raise SystemExit(f"baton serve ended with exit code {code}:\n{log.read_text()}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(_END_S)


def _is_ready(http: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{http}/health", timeout=_POLL_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
