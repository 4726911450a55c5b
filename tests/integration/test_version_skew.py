"""The last release and this version in one cluster: routers and workers of both, side by side.

The last release is a wheel of the commit in which proto/released.binpb last changed, since
``make proto-released`` is part of a release. Each context class owns the pools of one pair of
workers, so that a prompt's length says which versions serve it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import EngineSettings
from engine.offline import generate
from router.text.tokenizer import Tokenizer
from tests.support.mini_cluster import free_port
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
START_S, DEADLINE_S = 120.0, 60.0
TOKENS = 24
LONG_TOKENS = 280
STREAMS = 4
Version = Literal["old", "new"]
PAIRS: tuple[tuple[Version, Version], ...] = (
    ("old", "old"),
    ("old", "new"),
    ("new", "old"),
    ("new", "new"),
)
"""Versions of the prefill and the decode worker of each class but the last."""
CLASS_TOKENS = 32
"""The first class has prompts of up to this number of tokens, the second of twice as many, …"""
MOVES = "moves"
"""The last class: its decode workers, one of each version, take over each other's sequences."""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the history of the repository is not here: {error}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the last release."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history of the repository is not here: the clone is shallow")
    commit = _git("log", "-1", "--format=%H", "--", "proto/released.binpb")
    if not commit:
        pytest.skip("the history of the repository is not here: no commit has a release")
    folder = tmp_path_factory.mktemp("released")
    tree, wheels, code = folder / "tree", folder / "wheels", folder / "code"
    tree.mkdir()
    _git("archive", "--output", str(folder / "tree.tar"), commit)
    for command in (
        ["tar", "-xf", str(folder / "tree.tar"), "-C", str(tree)],
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "--quiet", "--wheel-dir", str(wheels), str(tree)),
        ],
    ):
        subprocess.run(command, timeout=START_S, check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(code)
    return code


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


class Answers:
    """The right answers: those of one engine of this version."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.load(model)
        settings = EngineSettings(
            model, "float32", device="cpu", kv_pool_bytes=16 << 20, drafter="none"
        )
        self._engine = build_engine(settings)

    def text(self, prompt: str, tokens: int) -> str:
        """The answer of ``tokens`` tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids = tuple(self._tokenizer.encode(prompt))
        spec = SequenceSpec("r", 0, "", ids, len(ids), sampling)
        (answer,) = generate(self._engine, [spec])
        return self._tokenizer.decode(answer.token_ids)


@dataclass(frozen=True)
class Cluster:
    """Processes of both versions with one store, one cluster id and one model."""

    released: Path
    model: Path
    redis_url: str
    folder: Path
    cluster_id: str
    stack: AsyncExitStack

    def config(self, **more: object) -> dict[str, object]:
        """Only fields that both versions know."""
        roles = [
            *((f"prefill-{version}", "prefill") for version in ("old", "new")),
            *((f"decode-{version}", "decode") for version in ("old", "new")),
            *((f"{MOVES}-{version}", "decode") for version in ("old", "new")),
        ]
        classes: list[dict[str, object]] = [
            {
                "name": f"{prefill}-{decode}",
                "max_tokens": CLASS_TOKENS * (number + 1),
                "pools": [f"prefill-{prefill}", f"decode-{decode}"],
            }
            for number, (prefill, decode) in enumerate(PAIRS)
        ]
        moved = ["prefill-old", "prefill-new", f"{MOVES}-old", f"{MOVES}-new"]
        classes.append({"name": MOVES, "pools": moved})
        return {
            "pools": [{"name": name, "role": role, "kv_pool_mib": 16} for name, role in roles],
            "classes": classes,
            "dtype": "float32",
            "local_prefill": "never",
            "advanced": {"registry_ttl_s": 20.0, "lease_s": 20.0, "hang_s": 20.0},
            **more,
        }

    async def worker(self, pool: str) -> None:
        """Start the worker of a pool, of the version in the pool's name, until it serves."""
        given = {
            "config": self.config(),
            "pool": pool,
            "model_path": str(self.model),
            "redis_url": self.redis_url,
            "cluster_id": self.cluster_id,
        }
        script = Path(__file__).with_name("skew_worker_script.py")
        process = await self._start(pool, str(script), json.dumps(given))
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        assert line, f"{pool} has not started:\n{self._log(pool).read_text()}"
        assert Path(json.loads(line)["code"]) == self._code(pool) / "baton"

    async def router(self, version: Version) -> httpx.AsyncClient:
        """Start a router, until it serves; its client."""
        name, http = f"router-{version}", f"127.0.0.1:{free_port()}"
        fronts = {"http": http, "grpc": "127.0.0.1:0", "data_dir": str(self.folder / name)}
        given = {
            "config": self.config(**fronts),
            "redis_url": self.redis_url,
            "cluster_id": self.cluster_id,
            "model_path": str(self.model),
            "model_name": "tiny",
        }
        process = await self._start(name, "-m", "router.main")
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        client = await self.stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{http}", timeout=DEADLINE_S, trust_env=False)
        )
        async with asyncio.timeout(START_S):
            while not await _is_healthy(client):
                assert process.returncode is None, self._log(name).read_text()
                await asyncio.sleep(0.1)
        return client

    def _code(self, name: str) -> Path:
        return self.released if name.endswith("old") else ROOT

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def _start(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        with self._log(name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=_environment(self._code(name)),
            )
        self.stack.push_async_callback(_end, process)
        return process


def _environment(code: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@asynccontextmanager
async def cluster_of(
    released: Path, model: Path, redis_url: str, folder: Path
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(released, model, redis_url, folder, secrets.token_hex(4), stack)


def prompt_of(number: int, length: int) -> str:
    """A prompt of ``length`` tokens, which the byte-level tokenizer takes one by one."""
    return "".join(chr(97 + (number * 11 + place * place) % 26) for place in range(length))


async def complete(client: httpx.AsyncClient, prompt: str, **more: object) -> str:
    """A request's whole text; it must succeed."""
    body = _body(prompt, **more)
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


async def stream(
    client: httpx.AsyncClient, prompt: str, begun: asyncio.Event | None = None, **more: object
) -> str:
    """The same as ``complete``, token by token. ``begun`` is set at the first one."""
    text = ""
    body = _body(prompt, stream=True, **more)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == httpx.codes.OK
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
            if text and begun is not None:
                begun.set()
    return text


def _body(prompt: str, **more: object) -> dict[str, Any]:
    plain = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    return {**plain, "prompt": prompt, **more}


async def _ready(client: httpx.AsyncClient, *slots: str) -> None:
    """Wait until a router knows exactly these workers."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            workers = (await client.get("/v1/cluster")).json()["workers"]
            if {one["slot"] for one in workers if one["state"] == "ready"} == set(slots):
                return
            await asyncio.sleep(0.1)


async def _moved(client: httpx.AsyncClient) -> float:
    page = (await client.get("/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        if family.name == "baton_moved_requests"
        for sample in family.samples
        if sample.name.endswith("_total")
    )


async def test_routers_and_workers_of_both_versions_give_the_same_answers(
    released: Path, model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Each router with each pair of workers: KV goes old to new, new to old, and within each."""
    answers = Answers(model)
    pools = ("prefill-old", "prefill-new", "decode-old", "decode-new")
    async with cluster_of(released, model, redis_url, tmp_path) as cluster:
        for pool in pools:
            await cluster.worker(pool)
        for version in ("old", "new"):
            client = await cluster.router(version)
            await _ready(client, *(f"{pool}-0" for pool in pools))
            for number, pair in enumerate(PAIRS):
                # Another prompt for each router: the second one would find the first one's blocks.
                prompt = prompt_of(number + 7 * len(version), CLASS_TOKENS * (number + 1))
                prompt = version + prompt[len(version) :]
                right = answers.text(prompt, TOKENS)
                assert await complete(client, prompt) == right, (version, pair)
                assert await stream(client, prompt) == right, (version, pair)
            page = (await client.get("/metrics")).text
            assert _served(page) == {f"{prefill}-{decode}" for prefill, decode in PAIRS}


def _served(page: str) -> set[str]:
    """The classes of the requests that were served."""
    return {
        sample.labels["class"]
        for family in text_string_to_metric_families(page)
        if family.name == "baton_requests"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] == "ok" and sample.value
    }


@pytest.mark.parametrize("router", ["old", "new"])
async def test_a_drain_moves_sequences_to_the_other_version_and_back(
    released: Path, model: Path, redis_url: str, tmp_path: Path, router: Version
) -> None:
    """A rolling upgrade, and a rolling downgrade: the streams continue with the same tokens."""
    answers = Answers(model)
    order: tuple[Version, ...] = ("old", "new", "old")
    async with cluster_of(released, model, redis_url, tmp_path) as cluster:
        for pool in ("prefill-old", "prefill-new", f"{MOVES}-{order[0]}"):
            await cluster.worker(pool)
        client = await cluster.router(router)
        for number, (leaves, comes) in enumerate(pairwise(order)):
            before = await _moved(client)
            prompts = [
                prompt_of(number * STREAMS + one, CLASS_TOKENS * len(PAIRS) + 20 + one)
                for one in range(STREAMS)
            ]
            begun = [asyncio.Event() for _ in prompts]
            await _ready(client, "prefill-old-0", "prefill-new-0", f"{MOVES}-{leaves}-0")
            await cluster.worker(f"{MOVES}-{comes}")
            running = [
                asyncio.create_task(stream(client, prompt, event, max_tokens=LONG_TOKENS))
                for prompt, event in zip(prompts, begun, strict=True)
            ]
            async with asyncio.timeout(DEADLINE_S):
                for event in begun:
                    await event.wait()
            answer = await client.post(
                f"/v1/workers/{MOVES}-{leaves}-0/drain", json={"deadline_s": 0, "force": True}
            )
            assert answer.status_code == httpx.codes.OK, answer.text
            for prompt, task in zip(prompts, running, strict=True):
                assert await task == answers.text(prompt, LONG_TOKENS)
            assert await _moved(client) > before
