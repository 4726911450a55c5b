"""C++ that is built for this machine at first use, kept in the cache and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from baton.cache import cache_dir
from baton.errors import ConfigError

NATIVE = "-march=native"
"""The target that is this machine's CPU."""
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-ffp-contract=fast",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
    "-pthread",
)
# GCC copies vectors of 64 bytes 16 at a time where the CPU's registers have 32, and reading 32 that
# were so written waits for the memory: without this a decode step of the CPU engine takes more than
# twice as long on AVX2.
_WIDE_COPIES = "-mmove-max=256"
_BUILD_S = 300.0


def load_library(folder: Path, target: str) -> ctypes.CDLL:
    """The library of a folder's sources, built where the cache does not have it.

    Calls into it release the GIL. Raises ConfigError, which says why, where it cannot be had.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ConfigError("no C++ compiler was found; install g++")
    try:
        return ctypes.CDLL(str(build_library(folder, compiler, target)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or b""
        said = detail.decode(errors="replace")[-2000:]
        raise ConfigError(f"the C++ in {folder} cannot be built: {error} {said}") from error


def build_library(folder: Path, compiler: str, target: str) -> Path:
    """The library of all ``*.cpp`` of a folder for ``target`` (an ``-march`` flag), in the cache.

    Its name tells apart sources, compilers, flags and CPUs. Several processes may build it at once;
    the last one's stays. Raises OSError or subprocess.SubprocessError where it cannot be built.
    """
    command = [*shlex.split(compiler), *_FLAGS, target]
    if _takes(command, _WIDE_COPIES):
        command.append(_WIDE_COPIES)
    digest = hashlib.sha256(_run([*command, "--version"]) + " ".join(command).encode())
    digest.update(_cpu_flags())
    sources = sorted(folder.glob("*.cpp"))
    for path in (*sources, *sorted(folder.glob("*.h"))):
        digest.update(path.read_bytes())
    library = cache_dir() / "kernels" / f"{digest.hexdigest()[:32]}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as unfinished:
        fresh = Path(unfinished) / "library.so"
        _run([*command, "-o", str(fresh), *map(str, sources)])
        fresh.replace(library)
    return library


def _takes(command: list[str], flag: str) -> bool:
    """Whether the compiler knows a flag: older ones, others and those for other CPUs do not."""
    try:
        _run([*command, flag, "-fsyntax-only", "-x", "c++", os.devnull])
    except subprocess.CalledProcessError:
        return False
    return True


def _cpu_flags() -> bytes:
    """What this CPU can do: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _run(command: list[str]) -> bytes:
    # The compiler that the operator's own environment names.
    return subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=_BUILD_S
    ).stdout
