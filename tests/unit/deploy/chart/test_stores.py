"""A real Valkey takes the configurations that the chart makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from baton.valkey_binary import valkey_binary
from deploy.processes.ports import free_port
from tests.support.deploy.chart import render, the

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
    file = tmp_path / "valkey.conf"
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
    file.write_text(the(apart, "Secret", "demo-baton-index")["stringData"]["valkey.conf"])
    port = free_port()
    bound = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path))
    process = subprocess.Popen([valkey_binary(), str(file), *bound], stdout=subprocess.DEVNULL)
    try:
        for user, address in urls.items():
            url = address.replace("demo-baton-index:6379", f"127.0.0.1:{port}")
            assert f"//{user}:" in url
            with redis.Redis.from_url(
                url, retry=BRIEFLY, retry_on_error=[redis.ConnectionError]
            ) as client:
                assert client.ping()
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.flushall()
    finally:
        process.kill()
        process.wait(10)
