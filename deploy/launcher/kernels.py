"""Compiles Baton's C++ before it is needed: for the CPU engine and for copies of KV blocks.

    python -m deploy.launcher.kernels

`make install` runs this while pip installs, `baton serve` at its start. It needs a C++ compiler and
Python's own library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.host.cpp_library import NATIVE, CppLibrary, Tell

if TYPE_CHECKING:
    from baton.config.cluster import Config
    from baton.config.pools import PoolConfig

_ROOT = Path(__file__).parents[2]
ENGINE, COPIES = _ROOT / "engine" / "cpu", _ROOT / "kvtransfer" / "native"
_NVIDIA = Path("/dev/nvidiactl")


def kernels_of(config: Config) -> tuple[Path, ...]:
    """Return the folders of the C++ libraries that the workers of a cluster on this machine use."""
    return (ENGINE, COPIES) if any(map(computes_on_cpu, config.pools)) else (COPIES,)


def computes_on_cpu(pool: PoolConfig) -> bool:
    """Return whether workers of a pool that run on this machine compute on its CPU."""
    return pool.device == "cpu" or (pool.device == "auto" and not _NVIDIA.exists())


def missing_kernels(folders: Sequence[Path] = (ENGINE, COPIES)) -> list[CppLibrary]:
    """Return the C++ libraries in ``folders`` that are not compiled yet. Raises ConfigError if
    there is no compiler."""
    libraries = [CppLibrary(folder, NATIVE) for folder in folders]
    return [library for library in libraries if not library.is_built]


def compile_kernels(libraries: Sequence[CppLibrary], tell: Tell) -> None:
    """Compile the C++ libraries, one after another. Raises ConfigError with the compiler's
    output."""
    for library in libraries:
        library.build(tell)


def main() -> int:
    """Compile all C++ libraries that are not compiled yet. Returns the exit code."""
    try:
        compile_kernels(missing_kernels(), _say)
    except ConfigError as error:
        _say(f"error: {error.message}")
        return 1
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
