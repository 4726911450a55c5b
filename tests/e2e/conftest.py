from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.answers import end_amid_an_answer, end_by_ctrl_c
from tests.support.e2e.cluster import PATIENT, SECRET, UpProcess

HOSTILE = """
from pathlib import Path

Path(__file__).parents[{levels}].joinpath("imported").touch()
raise SystemExit("a module of the current folder was imported")
"""


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of ``cluster``: its modules have the names of Baton's own.

    A program that imports one leaves the file ``imported``.
    """
    folder = tmp_path_factory.mktemp("project")
    for package in ("worker", "deploy", "engine", "baton"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(HOSTILE.format(levels=1))
    for module in ("router", "planning", "kvtransfer", "prefill_worker", "decode_worker"):
        (folder / f"{module}.py").write_text(HOSTILE.format(levels=0))
    return folder


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, hostile_folder: Path) -> Iterator[UpProcess]:
    """A cluster with the demo model, shared by all tests: leave it as it is.

    In fp32: in bf16 a near-tie may fall one way with a cached prefix and another way without.
    """
    data = {"BATON_DATA_DIR": str(tmp_path_factory.mktemp("data"))}
    env = PATIENT | data | {"BATON_CLUSTER_SECRET": SECRET}
    options = ("--dtype", "float32", "--quantization", "none")
    with UpProcess(*options, env=env, folder=hostile_folder) as up:
        yield up.wait_ready()
        up.terminate()
        assert up.wait() == 0, up.text
    assert not (hostile_folder / "imported").exists()


@pytest.fixture(scope="session")
def defaults() -> Iterator[UpProcess]:
    """A cluster as `make up` starts it, without an option or a variable. Ctrl-C ends it."""
    with UpProcess() as up:
        yield up.wait_ready()
        end_by_ctrl_c(up)


@pytest.fixture(scope="session")
def rough_ground() -> Iterator[UpProcess]:
    """The cluster of ``rough_cluster``. However it was treated, it ends as it should."""
    with UpProcess("--local-prefill", "never", env=PATIENT) as up:
        yield up.wait_ready()
        up.wait_healthy()
        end_amid_an_answer(up)


@pytest.fixture
def rough_cluster(rough_ground: UpProcess) -> UpProcess:
    """A cluster whose parts tests kill, shared by all that do: wait until they are back.

    It hands every request off.
    """
    rough_ground.wait_healthy()
    rough_ground.forget_output()
    return rough_ground
