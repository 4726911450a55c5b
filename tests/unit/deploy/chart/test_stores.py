"""A real Valkey takes the configurations that the chart makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from baton.store.redis_client import parse_password_file
from baton.valkey_binary import valkey_binary
from deploy.processes.ports import free_port
from tests.support.deploy.chart import CERTIFICATES, Manifest, component, pods, render, the

BRIEFLY = Retry(ConstantBackoff(0.02), 500)
"""Until a server that starts is there."""


@pytest.mark.parametrize("store", ["index", "gcs"])
def test_valkey_takes_its_configuration(store: str, tmp_path: Path) -> None:
    secret = the(render("stores-values.yaml"), "Secret", f"demo-baton-{store}")["stringData"]
    file, port = tmp_path / "valkey.conf", free_port()
    file.write_text(secret["valkey.conf"])
    command = [valkey_binary(), str(file), "--bind", "127.0.0.1", "--port", str(port)]
    with (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server,
        redis.Redis(port=port, password=secret["password"], retry=BRIEFLY) as client,
    ):
        try:
            assert client.ping()
            kept = client.config_get("appendonly")
            assert kept == {"appendonly": "yes" if store == "gcs" else "no"}
        finally:
            server.terminate()
            assert server.wait(20) == 0


def test_the_index_s_valkey_keeps_the_state_of_batches() -> None:
    def kept(*more: str) -> tuple[str, bool]:
        found = render("disaggregated-plain-values.yaml", *more)
        name = "demo-baton-index"
        text = the(found, "Secret", name)["stringData"]["valkey.conf"]
        claims = the(found, "StatefulSet", name)["spec"].get("volumeClaimTemplates")
        (line,) = [one for one in text.splitlines() if one.startswith("appendonly")]
        return line, bool(claims)

    assert kept() == ("appendonly yes", True)
    assert kept("--set=config.batch_store=") == ("appendonly no", False)


def test_the_index_s_valkey_knows_each_role_by_its_own_password(tmp_path: Path) -> None:
    whole, apart = render("stores-values.yaml"), render("disaggregated-plain-values.yaml")
    told = the(whole, "Secret", "demo-baton")["stringData"]
    urls = {
        "supervisor": told["redis-url"],
        "router": told["redis-router-url"],
        "worker": told["redis-worker-url"],
    }
    # Both sets have the same password; pods of routers and workers get their own address alone.
    for role in ("router", "worker"):
        secret = the(apart, "Secret", f"demo-baton-{role}")["stringData"]
        assert secret["redis-url"] == urls[role]
    with _valkey(the(apart, "Secret", "demo-baton-index"), tmp_path) as (port, secret):
        for user, address in urls.items():
            assert f"//{user}@" in address
            with _client(address, secret, port, tmp_path) as client:
                assert client.ping()
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.flushall()


def test_the_index_s_valkey_takes_the_password_before(tmp_path: Path) -> None:
    plain = "disaggregated-plain-values.yaml"
    before = the(render(plain), "Secret", "demo-baton-index")
    changed = "--set=redis.password=new,redis.previousPassword=example-index"
    now = the(render(plain, changed), "Secret", "demo-baton-index")
    url = the(render(plain, changed), "Secret", "demo-baton-worker")["stringData"]["redis-url"]
    with _valkey(now, tmp_path) as (port, secret):
        for each in (secret, before["stringData"]):
            with _client(url, each, port, tmp_path) as client:
                assert client.ping()
    after = the(render(plain, "--set=redis.password=new"), "Secret", "demo-baton-index")
    with (
        _valkey(after, tmp_path) as (port, secret),
        _client(url, before["stringData"], port, tmp_path) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


@pytest.mark.parametrize("value_set", ["kuberay-values.yaml", "disaggregated-values.yaml"])
def test_a_password_of_the_store_replaces_no_pod(value_set: str) -> None:
    outside = (
        "--set=redis.mode=external,redis.existingSecret=,redis.existingSecretUsers=false",
        "--set=redis.password=,redis.passwordSecret=store",
        "--set=redis.url=rediss://b:6379/0?password_file=/etc/baton-store/password",
    )
    inside = (
        "--set=redis.mode=valkey,redis.url=,redis.routerUrl=,redis.workerUrl=",
        "--set=redis.existingSecret=,redis.existingSecretUsers=false",
    )

    def made(*more: str) -> dict[str, Any]:
        found = dict(pods(render(value_set, CERTIFICATES, *more)))
        return {name: pod for name, pod in found.items() if not name.endswith("-index")}

    first = made(*inside, "--set=redis.password=a")
    assert first == made(*inside, "--set=redis.password=b,redis.previousPassword=a")
    for name, pod in (first | made(*outside)).items():
        mounts = {one["name"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        others = ("/head", "-gcs", "-health")
        assert ("store" in mounts) == (not name.endswith(others)), name
    for name, pod in made(*outside).items():
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        if "store" in volumes:
            secret = volumes["store"]["secret"]
            assert secret["secretName"] == "store"
            assert secret["items"] == [{"key": "password", "path": "password"}], name


def test_a_pod_has_no_password_of_other_roles() -> None:
    for name, pod in pods(render("disaggregated-plain-values.yaml")):
        for volume in pod["spec"].get("volumes", ()):
            if volume["name"] == "store":
                (item,) = volume["secret"]["items"]
                assert item["key"] == component(pod), name


@contextmanager
def _valkey(secret: Manifest, folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    told, port = secret["stringData"], free_port()
    file = folder / "valkey.conf"
    file.write_text(told["valkey.conf"])
    bound = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder))
    process = subprocess.Popen([valkey_binary(), str(file), *bound], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=told["password"], retry=BRIEFLY) as client:
            client.ping()
        yield port, told
    finally:
        process.kill()
        process.wait(10)


def _client(url: str, secret: dict[str, str], port: int, folder: Path) -> redis.Redis:
    """Connect as a pod with the files of ``secret``."""
    for name in ("router", "worker", "supervisor"):
        (folder / name).write_text(secret[name])
    here = url.replace("/etc/baton-store", str(folder))
    plain, credentials = parse_password_file(
        here.replace("demo-baton-index:6379", f"127.0.0.1:{port}")
    )
    return redis.Redis.from_url(plain, credential_provider=credentials)
