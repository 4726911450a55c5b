"""What an extra brings is imported when it is used, and an error names the extra without it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.extras import DISTRIBUTION, Extra, install_command, needs_extra
from baton.telemetry.logs import Service
from baton.telemetry.tracing import start_tracing
from deploy.models.model_cache import convert_once
from kvtransfer.transports.nixl.agent import NixlAgent
from loadtest.generator.load_bench import Outputs
from planning.common.plots import draw_lines

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("matplotlib", "gguf", "nixl", "opentelemetry.sdk", "opentelemetry.exporter")
MODULES = (
    *("deploy.cli.main", "deploy.launcher.launcher", "deploy.workers.worker_actor"),
    *("deploy.models.model_store", "router.main", "planning.plan_command", "planning.what_if"),
    *("loadtest.generator.load_bench", "loadtest.generator.load_page", "baton.client"),
)
WITHOUT = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {PACKAGES!r}):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
for name in {MODULES!r}:
    importlib.import_module(name)
"""


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes imports of packages fail, and those of modules start over."""

    def block(*packages: str, fresh: str = "") -> None:
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)
        if fresh:
            monkeypatch.delitem(sys.modules, fresh, raising=False)
            room, _, name = fresh.rpartition(".")
            monkeypatch.delattr(sys.modules[room], name, raising=False)

    return block


def test_the_project_has_the_extras_that_errors_name() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert set(get_args(Extra)) <= PROJECT["optional-dependencies"].keys()


def test_an_error_names_the_extra_the_reason_and_the_command() -> None:
    with pytest.raises(ConfigError) as caught, needs_extra("gguf", "a .gguf file"):
        raise ImportError("No module named 'gguf'")
    assert caught.value.message == (
        "a .gguf file needs the extra gguf (No module named 'gguf'):"
        ' pip install "baton-llm[gguf]"'
    )


def test_baton_is_imported_without_any_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_plots_need_bench(without: Callable[..., None], tmp_path: Path) -> None:
    without("matplotlib")
    with pytest.raises(ConfigError) as caught:
        draw_lines({}, title="t", x="x", y="y")
    assert install_command("bench") in caught.value.message


def test_a_benchmark_without_bench_fails_before_it_runs(
    without: Callable[..., None], tmp_path: Path
) -> None:
    without("matplotlib")
    Outputs(json=tmp_path / "a.json").check()
    with pytest.raises(ConfigError, match="extra bench"):
        Outputs(html=tmp_path / "a.html").check()


def test_a_gguf_file_needs_gguf(
    without: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    without("gguf", fresh="deploy.models.gguf_convert")
    with pytest.raises(ConfigError) as caught:
        convert_once(tmp_path / "a.gguf", "00", "", "a", "here", lambda line: None)
    assert install_command("gguf") in caught.value.message


def test_traces_need_otel(without: Callable[..., None]) -> None:
    without("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    config = Config(otlp_endpoint="http://127.0.0.1:4317")
    with pytest.raises(ConfigError) as caught:
        start_tracing(config, Service.ROUTER, "router-0", "c")
    assert install_command("otel") in caught.value.message


def test_the_transport_nixl_needs_nixl(without: Callable[..., None]) -> None:
    without("nixl")
    with pytest.raises(ConfigError) as caught:
        NixlAgent("none")
    assert install_command("nixl") in caught.value.message
