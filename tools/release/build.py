"""Builds what a release consists of, and compares it with the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from baton.extras import DISTRIBUTION
from baton.version import VERSION
from tools.release.trees import (
    CLIENT,
    ROOT,
    Files,
    application_files,
    client_files,
    stage_application,
    stage_client,
    stage_image_context,
    tracked_files,
)

_BUILD = """
import sys
from setuptools import build_meta
dist = sys.argv[1]  # setuptools replaces it
build_meta.build_sdist(dist)
build_meta.build_wheel(dist)
"""
_BUILD_S = 300
_CHART = ROOT / "deploy" / "helm" / "baton"


def run(*command: object, cwd: Path | None = None, timeout_s: float = _BUILD_S) -> str:
    """Run a command and return its standard output. Raises SystemExit with all of its output if it
    fails."""
    words = list(map(str, command))
    done = subprocess.run(  # noqa: S603 - commands of this package
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nfailed:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return environment variables for child processes: without PYTHONPATH, and with the commit's
    time for archives."""
    left = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    committed = subprocess.run(  # noqa: S603
        ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
        timeout=_BUILD_S,
    )
    return left | {"SOURCE_DATE_EPOCH": committed.stdout.strip()}


def build_distributions(dist: Path, folder: Path) -> tuple[Path, Path]:
    """Write sdists and wheels into ``dist``; ``folder`` is empty. Returns the paths of both wheels.

    Raises SystemExit if a wheel has files that do not belong to it, or lacks some that do.
    """
    owned: tuple[tuple[str, Callable[[Path], None], Files], ...] = (
        (CLIENT, stage_client, client_files(tracked_files())),
        (DISTRIBUTION, stage_application, application_files(tracked_files())),
    )
    wheels = []
    for name, stage, files in owned:
        tree = folder / name
        tree.mkdir()
        stage(tree)
        run(sys.executable, "-P", "-c", _BUILD, dist, cwd=tree)
        wheels.append(dist / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl")
        if (held := wheel_files(wheels[-1])) != files:
            raise SystemExit(f"{wheels[-1].name}: these differ: {sorted(held ^ files)}")
    return wheels[0], wheels[1]


def wheel_files(wheel: Path) -> Files:
    """Return the paths of the files that a wheel installs, except its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = map(PurePosixPath, archive.namelist())
        return frozenset(name for name in names if not name.parts[0].endswith(".dist-info"))


def build_image_context(dist: Path, folder: Path) -> Path:
    """Write the images' build context as an archive into ``dist``; ``folder`` is empty.

    Returns the path of a folder with the same context. `docker build` accepts the archive or the
    folder.
    """
    context = folder / f"{DISTRIBUTION}-{VERSION}-image"
    context.mkdir()
    stage_image_context(context)
    with tarfile.open(dist / f"{context.name}.tar.gz", "w:gz") as archive:
        archive.add(context, arcname="")
    return context


def build_chart(dist: Path, helm: str) -> Path:
    """Package the Helm chart with the version of Baton, after a check by Helm. Returns the
    archive's path."""
    run(helm, "lint", "--strict", _CHART)
    versions = ("--version", VERSION, "--app-version", VERSION)
    run(helm, "package", _CHART, "--destination", dist, *versions)
    return dist / f"baton-{VERSION}.tgz"
