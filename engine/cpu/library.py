"""The CPU engine's C++, built for this machine at first use and kept in the cache.

Without a C++ compiler there is no library, and torch computes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from baton.cache import cache_dir

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_TARGET = "-march=native"
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
# were so written waits for the memory: without this a step takes more than twice as long on AVX2.
_WIDE_COPIES = "-mmove-max=256"
_BUILD_S = 300.0


@lru_cache(maxsize=1)
def cpu_library() -> ctypes.CDLL | None:
    """The library, or None where torch is to compute; the reason is logged once."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.warning("no C++ compiler was found: torch computes, several times slower; install g++")
        return None
    try:
        return ctypes.CDLL(str(build_library(compiler, _TARGET)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or b""
        log.warning(
            "the CPU engine cannot be built, torch computes, several times slower: %s %s",
            error,
            detail.decode(errors="replace")[-2000:],
        )
        return None


def library_build() -> str:
    """What names the library: its sources, compiler and CPU. Two builds may differ in last bits."""
    library = cpu_library()
    return "" if library is None else Path(library._name).stem


def build_library(compiler: str, target: str) -> Path:
    """The library for ``target`` (an ``-march`` flag), in the cache; built where it is not there.

    Several processes may build it at once; the last one's stays. Raises OSError or
    subprocess.SubprocessError where it cannot be built.
    """
    command = [*shlex.split(compiler), *_FLAGS, target]
    if _takes(command, _WIDE_COPIES):
        command.append(_WIDE_COPIES)
    digest = hashlib.sha256(_run([*command, "--version"]) + " ".join(command).encode())
    digest.update(_cpu_flags())
    sources = sorted(_FOLDER.glob("*.cpp"))
    for path in (*sources, *sorted(_FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    library = cache_dir() / "kernels" / f"{digest.hexdigest()[:32]}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / "engine.so"
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
