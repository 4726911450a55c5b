"""The two distributions of the tree: which files are whose, and a folder to build each from.

The client owns ``baton/client``, ``baton/v1`` and the modules that these import. The application
owns the rest of what pyproject.toml lists, and requires the client at its own version.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from baton.extras import DISTRIBUTION
from baton.version import VERSION

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CLIENT = f"{DISTRIBUTION}-client"
_ROOTS = ("baton/client", "baton/v1")
_TYPED = "baton/py.typed"
_GIT_S = 60
_DEPENDENCIES = "\ndependencies = [\n"

Files = frozenset[PurePosixPath]
"""Paths relative to the tree's root."""


def tracked_files(root: Path = ROOT) -> Files:
    """Return the files that Git tracks and that exist."""
    listed = subprocess.run(  # noqa: S603 - Git's list of files
        ["git", "-C", str(root), "ls-files", "-z"],  # noqa: S607 - the one on the path
        capture_output=True,
        check=True,
        timeout=_GIT_S,
    ).stdout.decode()
    return frozenset(
        PurePosixPath(name) for name in listed.split("\0") if name and (root / name).is_file()
    )


def distributed_files(files: Files) -> Files:
    """Return those of ``files`` that pyproject.toml installs: modules and package data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = settings["packages"]["find"]
    data = settings["package-data"]

    def is_distributed(file: PurePosixPath) -> bool:
        package = ".".join(file.parts[:-1])
        if not any(fnmatch(package, one) for one in found["include"]):
            return False
        if any(fnmatch(package, one) for one in found["exclude"]):
            return False
        if file.suffix in (".py", ".pyi"):
            return True
        return any(
            file.match(f"{owner.replace('.', '/')}/{pattern}")
            for owner, patterns in data.items()
            for pattern in patterns
        )

    return frozenset(filter(is_distributed, files))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere. For ``from a import b``, these are
    ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def client_files(files: Files) -> Files:
    """Return those of ``files`` that belong to the client: the files in its folders, and all
    modules that these import."""
    typed = PurePosixPath(_TYPED)
    owned = {typed} if typed in files else set()
    waiting = [file for file in files if str(file.parent) in _ROOTS]
    while waiting:
        file = waiting.pop()
        if file in owned:
            continue
        owned.add(file)
        waiting += [one / "__init__.py" for one in file.parents if one / "__init__.py" in files]
        if file.suffix == ".py":
            names = (PurePosixPath(*name.split(".")) for name in imports(ROOT / file))
            targets = (one for name in names for one in (name / "__init__.py", _module(name)))
            waiting += [one for one in targets if one in files]
    return frozenset(owned)


def _module(name: PurePosixPath) -> PurePosixPath:
    return name.with_name(f"{name.name}.py")


def application_files(files: Files) -> Files:
    """Return those of ``files`` that belong to the application."""
    return distributed_files(files) - client_files(files)


def stage_client(folder: Path) -> None:
    """Write the client's source tree into ``folder``, which is empty."""
    _copy(client_files(tracked_files()), folder)
    for name, source in (
        ("pyproject.toml", HERE / "client.toml"),
        ("README.md", HERE / "client.md"),
        ("LICENSE", ROOT / "LICENSE"),
    ):
        shutil.copyfile(source, folder / name)
    (folder / "VERSION").write_text(f"{VERSION}\n")


def stage_application(folder: Path) -> None:
    """Write the application's source tree into ``folder``, which is empty."""
    _copy(application_files(tracked_files()), folder)
    for name in ("README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    project = (ROOT / "pyproject.toml").read_text()
    assert project.count(_DEPENDENCIES) == 1, "pyproject.toml has one list of dependencies"
    required = f'{_DEPENDENCIES}    "{CLIENT}=={VERSION}",\n'
    (folder / "pyproject.toml").write_text(project.replace(_DEPENDENCIES, required))


def image_context() -> Files:
    """Return the files from which the images are built: those that .dockerignore admits, and the
    Dockerfile."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith(("#", "**"))]
    admitted = {rule[1:] for rule in rules if rule.startswith("!")} | {"Dockerfile"}
    left_out = {rule for rule in rules[1:] if not rule.startswith("!")}
    return frozenset(
        file
        for file in tracked_files()
        if _lies_in(file, admitted) and not _lies_in(file, left_out)
    )


def stage_image_context(folder: Path) -> None:
    """Write the images' build context into ``folder``, which is empty."""
    _copy(image_context(), folder)


def _lies_in(file: PurePosixPath, folders: set[str]) -> bool:
    return str(file) in folders or any(str(parent) in folders for parent in file.parents)


def _copy(files: Iterable[PurePosixPath], folder: Path) -> None:
    for file in files:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
