"""The two distributions: what each owns, that they share nothing, and that nothing is left out."""

from __future__ import annotations

import sys
import tarfile
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from baton.version import VERSION
from tools.release.build import build_distributions, build_image_context, wheel_files
from tools.release.trees import (
    CLIENT,
    HERE,
    ROOT,
    application_files,
    client_files,
    distributed_files,
    imports,
    stage_application,
    tracked_files,
)

FILES = tracked_files()
OWNED = client_files(FILES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT_PROJECT = tomllib.loads((HERE / "client.toml").read_text())["project"]
PACKAGE_OF = {"google": "protobuf", "grpc": "grpcio"}


def external_names() -> set[str]:
    """The packages that the client's modules import from elsewhere."""
    tops = {
        name.partition(".")[0]
        for file in OWNED
        if file.suffix == ".py"
        for name in imports(ROOT / file)
    }
    return tops - set(sys.stdlib_module_names) - {"baton"}


def test_the_client_imports_nothing_of_the_application() -> None:
    modules = {".".join(file.with_suffix("").parts) for file in application_files(FILES)}
    borrowed = {
        f"{file} imports {name}"
        for file in OWNED
        if file.suffix == ".py"
        for name in imports(ROOT / file)
        if name in modules
    }
    assert borrowed == set()


def test_the_client_has_its_folders_and_not_the_rest_of_baton() -> None:
    for folder in ("baton/client", "baton/v1"):
        there = {file for file in FILES if str(file.parent) == folder}
        assert there
        assert there <= OWNED
    assert {"baton/__init__.py", "baton/py.typed", "baton/errors.py"} <= set(map(str, OWNED))
    assert all(file.parts[0] == "baton" for file in OWNED)
    assert PurePosixPath("baton/config/cluster.py") in application_files(FILES)


def test_the_client_requires_what_it_imports_as_the_application_does() -> None:
    required = {Requirement(one).name: one for one in CLIENT_PROJECT["dependencies"]}
    assert set(required) == {PACKAGE_OF.get(name, name) for name in external_names()}
    assert set(required.values()) <= set(PROJECT["dependencies"])
    assert CLIENT_PROJECT["requires-python"] == PROJECT["requires-python"]
    pythons = [one for one in PROJECT["classifiers"] if "Python ::" in one]
    assert [one for one in CLIENT_PROJECT["classifiers"] if "Python ::" in one] == pythons


def test_the_application_requires_the_client_at_its_own_version(tmp_path: Path) -> None:
    stage_application(tmp_path)
    staged = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert staged["dependencies"] == [f"{CLIENT}=={VERSION}", *PROJECT["dependencies"]]
    # A checkout is both: nothing is published that it could need.
    assert not any(one.startswith(CLIENT) for one in PROJECT["dependencies"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_wheels_share_no_file_and_are_the_whole_tree(tmp_path: Path) -> None:
    (dist := tmp_path / "dist").mkdir()
    wheels = build_distributions(dist, tmp_path)
    client, application = map(wheel_files, wheels)
    assert not client & application
    assert client | application == distributed_files(FILES)
    names = sorted(file.name for file in dist.iterdir())
    assert names == [
        f"baton_llm-{VERSION}-py3-none-any.whl",
        f"baton_llm-{VERSION}.tar.gz",
        f"baton_llm_client-{VERSION}-py3-none-any.whl",
        f"baton_llm_client-{VERSION}.tar.gz",
    ]
    for name, files in ((names[1], application), (names[3], client)):
        with tarfile.open(dist / name) as archive:
            held = {PurePosixPath(*Path(one).parts[1:]) for one in archive.getnames()}
        assert files <= held, "the sdist holds what its wheel is built from"


def test_the_context_of_images_has_what_the_dockerfile_copies(tmp_path: Path) -> None:
    (dist := tmp_path / "dist").mkdir()
    context = build_image_context(dist, tmp_path)
    held = {file.relative_to(context) for file in context.rglob("*") if file.is_file()}
    assert {PurePosixPath(file) for file in held} >= distributed_files(FILES)
    assert {Path("Dockerfile"), Path("requirements/cpu.lock")} <= held
    assert not any(file.parts[:2] == ("deploy", "helm") for file in held)
