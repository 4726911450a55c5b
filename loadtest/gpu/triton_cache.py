"""Compiles kernels before a GPU is available, for use on another machine:

python -m loadtest.gpu.triton_cache DIR --capability 90

It runs the items of a GPU run with tensors that have no values, and compiles the kernels that the
items would launch. It needs the same version of Triton as the GPU's machine, but the version of
Python may differ.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import compiler
from triton.runtime.cache import triton_key

from engine.gpu.compile_ahead import compile_launch
from engine.gpu.kernels.launch import Launch, describe
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Item
from loadtest.gpu.phases import PHASES

_ROOT = Path(__file__).resolve().parents[2]
_ABOUT = "baton.json"
_GROUP = "__grp__"


class StaleCache(Exception):
    """Raised if this Triton cannot use a folder of compiled kernels. The message says what to
    do."""


def code_hash() -> str:
    """Return a hash of the code that a run executes: 16 hex digits, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("baton", "engine", "kvtransfer", "loadtest/gpu", "worker"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def described_items() -> Iterator[Item]:
    """Yield all items that can launch their kernels on tensors without values, at full size."""
    place = Place(torch.device("meta"), torch.bfloat16, small=False)
    for phase in (phase for phase in PHASES if phase.describes):
        yield from phase.items(place, Path())


def fill(folder: Path, capability: int, items: Iterable[Item]) -> int:
    """Compile the kernels that the items launch. Return the number of kernels that ``folder`` then
    has.

    Raises Triton's errors. ``folder`` is an absolute path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    ends: dict[str, str] = {}
    with _noted_keys(ends):
        for item in items:
            launches: list[Launch] = []
            with describe(capability, launches.append), torch.inference_mode():
                for _ in item.work():
                    pass
            for launch in launches:
                compile_launch(launch, capability)
    about = {"triton": triton.__version__, "folder": str(folder), "keys": ends}
    (folder / _ABOUT).write_text(json.dumps(about))
    return len(list(folder.glob(f"*/{_GROUP}*")))


@contextmanager
def _noted_keys(ends: dict[str, str]) -> Iterator[None]:
    """During the block, collect the end of each compiled kernel's key in ``ends``, by the name of
    the kernel's folder.

    A key begins with a hash of triton's own files. This hash differs between Triton builds for two
    versions of Python, although both compile the same code.
    """
    original = compiler.get_cache_key

    def noted(*args: Any, **named: Any) -> str:
        key: str = original(*args, **named)
        ends[_folder_of(key)] = key.removeprefix(triton_key())
        return key

    compiler.get_cache_key = noted
    try:
        yield
    finally:
        compiler.get_cache_key = original


def _folder_of(key: str) -> str:
    """Return the name of the folder in which Triton keeps the kernel with this key."""
    return base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")


def unpack(folder: Path, target: Path) -> Path:
    """Copy compiled kernels to the writable folder ``target``, and return it.

    The copies get the cache keys of this build of Triton. Triton's files contain the path of their
    folder, which may have moved. Raises StaleCache.
    """
    try:
        about = json.loads((folder / _ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise StaleCache(
            f"{folder} has no compiled kernels: fill it with python -m loadtest.gpu.triton_cache"
        ) from error
    if about["triton"] != triton.__version__:
        raise StaleCache(
            f"{folder} was filled by triton {about['triton']} and this is {triton.__version__}: "
            "fill it with the same version"
        )
    target.mkdir(parents=True)
    own = triton_key()
    for name, end in about["keys"].items():
        shutil.copytree(folder / name, target / _folder_of(own + end))
    for path in target.glob(f"*/{_GROUP}*"):
        group = json.loads(path.read_text())
        names = group["child_paths"]
        group["child_paths"] = {name: str(path.parent / Path(names[name]).name) for name in names}
        path.write_text(json.dumps(group))
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a folder with compiled kernels."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu.triton_cache", description="compile a run's kernels ahead"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--capability", type=int, default=90, help="of the GPU: 80, 90 or 100; default: 90"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    count = fill(options.folder.resolve(), options.capability, described_items())
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    sys.stdout.write(f"{count} kernels, {size / 2**20:.0f} MiB, {took:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
