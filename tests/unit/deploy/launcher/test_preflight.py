"""Listeners that other machines reach have keys and TLS, or an explicit option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.config.access import KeyConfig
from baton.config.choices import TransportName
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.tls import TlsConfig
from baton.errors import ConfigError
from deploy import certificates
from deploy.launcher.preflight import check_exposure, preflight
from deploy.processes.ports import free_port
from tests.support.models import make_tiny_model
from worker.settings import WorkerSettings

KEYS: dict[str, Any] = {
    "keys": (KeyConfig(name="a", tenant="default", sha256="0" * 64),),
    "require_key": True,
}
OWN = "10.0.0.7"
"""A node's address."""


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    return {"tls": TlsConfig(folder=str(tmp_path))}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2"])
def test_this_machine_s_own_addresses_need_nothing(host: str) -> None:
    check_exposure(Config(http=f"{host}:8000", grpc=f"{host}:8001"))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.5", "llm.example.com"])
def test_others_need_keys_and_tls(host: str, tls: dict[str, Any]) -> None:
    for name in ("http", "grpc", "admin_http"):
        exposed: dict[str, Any] = {name: f"{host}:8002"}
        with pytest.raises(ConfigError, match="without API keys and TLS"):
            check_exposure(Config(**exposed))
        with pytest.raises(ConfigError, match=r"without TLS.*baton certs init"):
            check_exposure(Config(**exposed, **KEYS))
        with pytest.raises(ConfigError, match=r"without API keys.*keys create"):
            check_exposure(Config(**exposed, **tls))
        check_exposure(Config(**exposed, **KEYS, **tls))


def test_optional_keys_do_not_count_as_keys(tls: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="API keys"):
        check_exposure(Config(http="0.0.0.0:8000", **KEYS | {"require_key": False}, **tls))


def test_insecure_listen_allows_exposure(tls: dict[str, Any]) -> None:
    check_exposure(Config(http="0.0.0.0:8000", insecure_listen=True))


@pytest.mark.parametrize(
    "field", ["redis_url", "redis_router_url", "redis_worker_url", "gcs_store"]
)
def test_redis_on_another_machine_needs_tls(field: str, tls: dict[str, Any]) -> None:
    """With certificates or without: they are not used for a ``redis://`` address."""
    clear: dict[str, Any] = {field: "redis://:planted@store.example.com:6379/0"}
    flag = field.replace("_", "-")
    for others in ({}, tls, {"insecure_listen": True}):
        with pytest.raises(ConfigError, match=rf"--{flag} redis://store\.example\.com: ") as told:
            check_exposure(Config(**clear, **others))
        assert "planted" not in told.value.message
        assert "rediss://" in told.value.message
        check_exposure(Config(**clear, **others, insecure_redis=True))
    encrypted: dict[str, Any] = {field: "rediss://:planted@store.example.com:6379/0"}
    check_exposure(Config(**encrypted, **tls))
    for host in ("127.0.0.1:6379", "localhost", "[::1]:6379"):
        here: dict[str, Any] = {field: f"redis://:p@{host}/0"}
        check_exposure(Config(**here))


def test_kv_outside_of_tls_needs_a_named_network(tls: dict[str, Any], tmp_path: Path) -> None:
    clear = TlsConfig(folder=str(tmp_path), clear_kv=True)
    for transport in ("gloo", "nccl", "nixl"):
        for files in (tls, {"tls": clear}):
            with pytest.raises(ValueError, match="set data_network to the network"):
                Config(transport=transport, **files)
            Config(transport=transport, data_network="10.1.0.0/16", **files)
        Config(transport=transport)
        Config(transport=transport, data_network="eth1")


@pytest.mark.parametrize("network", ["10.1.0.0/33", "eth1/24", "an interface", "-eth1", "e" * 16])
def test_a_network_is_a_cidr_or_an_interface(network: str) -> None:
    with pytest.raises(ValueError, match="neither a CIDR such as"):
        Config(transport="gloo", data_network=network)


@pytest.mark.parametrize("transport", ["auto", "shm", "grpc"])
def test_a_network_that_no_transport_uses_is_refused(transport: TransportName) -> None:
    with pytest.raises(ValueError, match=f"data_network: transport {transport} does not use it"):
        Config(transport=transport, data_network="eth1")


def test_ranks_that_would_speak_in_the_clear_beyond_their_node_are_refused(
    tls: dict[str, Any], tmp_path: Path
) -> None:
    clear = TlsConfig(folder=str(tmp_path), clear_kv=True)
    decode = PoolConfig(name="decode", role="decode")
    for placement, host in (("strict_pack", "127.0.0.1"), ("pack", OWN), ("spread", OWN)):
        pool = PoolConfig(name="prefill", role="prefill", tp=2, rank_placement=placement)
        if placement == "strict_pack":
            Config(pools=(pool, decode), **tls)
        else:
            with pytest.raises(ValueError, match=r"strict_pack, or set tls\.clear_kv"):
                Config(pools=(pool, decode), **tls)
        config = Config(pools=(pool, decode), tls=clear)
        worker = WorkerSettings(config, pool, "prefill-0", "", "", "", "", 1, host=OWN)
        assert worker.group_host == host


@pytest.mark.parametrize(
    ("elsewhere", "message"),
    [
        ({}, "router.pem"),
        ({"ray_address": "ray:6379"}, "router.pem"),
        ({"routers": 0, "ray_address": "auto"}, "worker.pem"),
        # Its certificates are fine, and the next check fails.
        ({"routers": 0, "ray_address": "ray:6379"}, "--redis-url rediss://127.0.0.1"),
    ],
)
async def test_a_launcher_needs_no_certificates_of_roles_that_run_elsewhere(
    elsewhere: dict[str, Any], message: str, tmp_path: Path
) -> None:
    certificates.init(tmp_path)
    for role in ("router", "worker"):
        (tmp_path / f"{role}.pem").unlink()
    config = Config(
        cluster_id="blue",
        redis_url=f"rediss://127.0.0.1:{free_port()}",
        tls=TlsConfig(folder=str(tmp_path)),
        **elsewhere,
    )
    with pytest.raises(ConfigError) as caught:
        await preflight(config)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "fields", [{"certificate": "a"}, {"key": "a"}, {"client_ca": "a"}], ids=str
)
def test_half_a_configuration_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"go together|needs a folder"):
        TlsConfig(**fields)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Free ports, and a model that is found."""
    return Config(
        model=str(make_tiny_model(tmp_path / "tiny")), http="127.0.0.1:0", grpc="127.0.0.1:0"
    )


def with_(config: Config, **given: Any) -> Config:
    return config.model_copy(update=given)


async def test_a_model_that_is_not_there_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"no model 'smollm2-135m-instruc'.*Did you mean"):
        await preflight(with_(config, model="smollm2-135m-instruc"))
    with pytest.raises(ConfigError, match="no model 'nope'"):
        await preflight(with_(config, draft_model="nope", drafter="draft"))
    with pytest.raises(ConfigError, match="heads of drafter medusa are a folder"):
        await preflight(with_(config, draft_model="nope", drafter="medusa"))
    with pytest.raises(ConfigError, match="revision 'main' is only for a Hugging Face id"):
        await preflight(with_(config, revision="main"))


async def test_a_model_that_the_engine_does_not_support_is_refused(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"architectures": ["Other"], "model_type": "other"}')
    with pytest.raises(ConfigError, match="Other"):
        await preflight(with_(config, model=str(tmp_path)))


async def test_kv_blocks_beyond_the_memory_of_this_machine_are_refused(config: Config) -> None:
    large = 999_999_999
    pools = (
        PoolConfig(name="prefill", role="prefill", device="cpu", kv_pool_mib=64),
        PoolConfig(name="decode", role="decode", device="cpu", count=2, kv_pool_mib=large),
    )
    with pytest.raises(ConfigError, match=r"need 2000000062 MiB.*decode: 2 × 999999999.*lower kv"):
        await preflight(with_(config, pools=pools))
    gpu = tuple(pool.model_copy(update={"device": "cuda"}) for pool in pools)
    await preflight(with_(config, pools=gpu))


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/data"])
async def test_a_configured_data_dir_that_cannot_be_written_stops_the_start(
    config: Config, folder: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data_dir {folder} cannot be written .*--data-dir"):
        await preflight(config.model_copy(update={"data_dir": folder}))


async def test_a_default_data_dir_that_cannot_be_written_is_advice(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers need none."""
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/x")
    (advice,) = (await preflight(config)).advice
    assert "507 storage_full" in advice


async def test_a_full_data_dir_is_advice(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tempfile.TemporaryFile",
        lambda dir: open("/dev/full", "wb", 0),  # noqa: SIM115
    )
    checked = await preflight(config.model_copy(update={"data_dir": str(tmp_path / "data")}))
    (advice,) = checked.advice
    assert "No space left on device" in advice
    assert not (tmp_path / "data").exists()


async def test_a_data_dir_is_not_made_by_the_check(config: Config, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert (await preflight(config.model_copy(update={"data_dir": str(data)}))).advice == ()
    assert not data.exists()
