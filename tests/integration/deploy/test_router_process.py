"""`baton router` with workers that a real Valkey lists, and a small hub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import router.main
from baton.config.cluster import Config
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from deploy.launcher.router_process import serve_router
from deploy.processes.ports import free_port
from router.main import RouterSettings
from tests.support.hub_stub import HubStub, files_of
from tests.support.router.workers import record

ID = "tests/tiny-llama"


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """Its branch main has moved on since the workers have started."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "baton"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with HubStub() as stub:
        model = stub.add(ID, tiny_model)
        model.refs["workers"] = model.refs["main"]
        model.commit(files_of(tiny_model) | {"chat_template.jinja": b"another"})
        urls = f"{stub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        yield stub
        huggingface_hub.close_session()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RouterSettings]:
    """With what routers were started; none of them runs."""
    started: list[RouterSettings] = []
    monkeypatch.setattr(router.main, "run", started.append)
    return started


def config(redis_url: str, cluster_id: str, revision: str = "") -> Config:
    ports = {"http": f"127.0.0.1:{free_port()}", "grpc": f"127.0.0.1:{free_port()}"}
    return Config.model_validate(
        {"model": ID, "redis_url": redis_url, "cluster_id": cluster_id, "revision": revision}
        | ports
    )


def list_worker(redis_url: str, cluster_id: str, commit: str) -> None:
    async def put() -> None:
        async with redis_client(redis_url) as client:
            await Registry(client, cluster_id).put(replace(record("d-0"), revision=commit), 60.0)

    asyncio.run(put())


def test_it_takes_the_workers_commit_and_no_weights(
    redis_url: str, hub: HubStub, started: list[RouterSettings]
) -> None:
    refs = hub.models[ID].refs
    list_worker(redis_url, "router-late", refs["workers"])
    serve_router(config(redis_url, "router-late"))
    (settings,) = started
    assert Path(settings.model_path).name == refs["workers"] != refs["main"]
    assert settings.config["revision"] == refs["workers"]
    assert (Path(settings.model_path) / "tokenizer.json").is_file()
    assert hub.downloads(".safetensors") == []


def test_it_takes_the_commit_that_is_configured(
    redis_url: str, hub: HubStub, started: list[RouterSettings]
) -> None:
    """New routers start while the old commit's workers serve. They get no requests of these."""
    refs = hub.models[ID].refs
    list_worker(redis_url, "router-other", refs["workers"])
    serve_router(config(redis_url, "router-other", refs["main"]))
    assert started[0].config["revision"] == refs["main"]


def test_before_the_workers_it_takes_the_branch(
    redis_url: str, hub: HubStub, started: list[RouterSettings]
) -> None:
    serve_router(config(redis_url, "router-early"))
    assert started[0].config["revision"] == hub.models[ID].refs["main"], "it refuses others later"
