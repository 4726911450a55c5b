"""The CPU kernels, in C++ for CPUs with AVX512-BF16: built at first use, kept in the cache.

Decoding reads every weight and every key for a handful of rows, so that it is bound by memory;
torch's own bf16 kernels leave half of the bandwidth unused there. Without such a CPU, or without a
C++ compiler, there are no kernels and torch computes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from baton.cache import cache_dir

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("cpu_attention.cpp", "cpu_linear.cpp")
_HEADERS = ("cpu_lanes.h",)
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512bf16",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_BUILD_S = 120.0


@lru_cache(maxsize=1)
def cpu_library() -> ctypes.CDLL | None:
    """The library, or None where torch is to compute; the reason is logged once."""
    if not _has_avx512_bf16():
        log.info("this CPU has no AVX512-BF16: torch computes")
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.warning("no C++ compiler was found: torch computes, at about half the speed")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels cannot be built, torch computes: %s", error)
        return None


def _has_avx512_bf16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _build(compiler: str) -> Path:
    """The library in the cache. Several processes may build it at once; the last one stays."""
    digest = hashlib.sha256(_run([compiler, "--version"]) + " ".join(_FLAGS).encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    target = cache_dir() / "kernels" / f"{digest.hexdigest()[:32]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "kernels.so"
        sources = [str(_FOLDER / name) for name in _SOURCES]
        _run([compiler, *_FLAGS, "-o", str(fresh), *sources])
        fresh.replace(target)
    return target


def _run(command: list[str]) -> bytes:
    # The compiler that the operator's own environment names.
    return subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=_BUILD_S
    ).stdout
