"""deploy/compose/: valid, closed to the outside, and fit for what Baton can do."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from baton.config.cluster import load_config
from baton.valkey_binary import valkey_binary
from deploy.launcher.preflight import check_exposure
from deploy.processes.ports import free_port
from deploy.ray.ray_cluster import OBJECT_STORE_BYTES
from tests.support.deploy.baton_commands import parse, unknown_variables
from tests.support.programs import promtool

FOLDER = Path(__file__).parents[3] / "deploy" / "compose"
PROFILES = {"cpu": ("prefill", "decode"), "gpu": ("prefill-gpu", "decode-gpu")}
"""And the services of workers' nodes that only it starts."""
NODES = tuple(name for names in PROFILES.values() for name in names)
BATON = ("ray-head", "launcher", "router", *NODES)
"""Services that run Baton's image."""
NEVER = Retry(NoBackoff(), 0)
BRIEFLY = Retry(ConstantBackoff(0.02), 500)
"""Until a server that starts is there."""
_DEADLINE_S = 20.0
_CHECK_S = 60.0


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def nginx() -> str:
    """Its configuration, without comments."""
    return re.sub(r"(?m)#.*$", "", (FOLDER / "nginx.conf").read_text())


def test_the_file_is_what_the_specification_allows() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema has the schema")
    file = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(file.read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []
    spoilt = compose()
    spoilt["services"]["nginx"]["restrat"] = "always"
    assert list(validator.iter_errors(spoilt))


def test_a_profile_is_its_workers_and_all_else_is_always_there() -> None:
    for name, service in services().items():
        profiles = [profile for profile, nodes in PROFILES.items() if name in nodes]
        assert service.get("profiles", []) == profiles, name
        # No service may wait for one of another profile.
        assert not {*service.get("depends_on", ())} & {*NODES}, name
    assert services()["router"]["scale"] == 2
    assert services()["nginx"]["depends_on"] == {"router": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", ["launcher", "router"])
def test_launcher_and_routers_take_command_line_and_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services()[name]
    parsed = parse(service["command"])
    assert parsed.name == {"launcher": "serve", "router": "router"}[name]
    assert unknown_variables(list(service["environment"])) == []
    (local,) = [one for one in service["volumes"] if one.startswith("./")]
    file, inside, _ = local.split(":")
    assert str(parsed.parameters["config"]) == inside
    for variable, value in service["environment"].items():
        # As Compose does, with what `openssl rand -hex 32` may make.
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:\?[^}]*\}", "0" * 64, value))
    config = load_config(FOLDER / file)
    check_exposure(config)
    assert config.cluster_id == "compose"
    assert (config.ray_address, config.routers) == (
        ("ray-head:6379", 0) if name == "launcher" else ("", 1)
    )
    assert config.leave_workers is (name == "launcher")


def test_pools_ask_for_what_nodes_offer() -> None:
    pools = {pool.role: pool for pool in load_config(FOLDER / "baton.toml").pools}
    assert {*pools} == {"prefill", "decode"}
    for names in PROFILES.values():
        for name, (role, pool) in zip(names, sorted(pools.items(), reverse=True), strict=True):
            parsed = parse(services()[name]["command"])
            assert parsed.name == "join"
            assert parsed.parameters["address"] == "ray-head:6379"
            assert parsed.parameters["workers"] == pool.count == 1
            assert parsed.parameters["resource"] == [f"baton_{role}=1"]
            assert pool.resources == {f"baton_{role}": 1}
            # One configuration for both profiles: a worker takes the GPU that its container has.
            assert pool.device == "auto"
            assert f" {parsed.parameters['port']})" in services()[name]["healthcheck"]["test"][-1]


def test_ray_takes_its_command_line() -> None:
    from ray.scripts.scripts import cli  # noqa: PLC0415

    head = services()["ray-head"]
    *init, program = head["entrypoint"]
    assert (init, program) == (["tini", "--"], "ray")
    start, *arguments = head["command"]
    taken = cli.commands[start].make_context(start, arguments).params
    assert taken["head"]
    assert taken["block"]
    assert taken["num_cpus"] == 0
    assert taken["object_store_memory"] == OBJECT_STORE_BYTES
    address = f"ray-head:{taken['port']}"
    assert services()["launcher"]["environment"]["BATON_RAY_ADDRESS"] == address
    assert f" {taken['port']})" in head["healthcheck"]["test"][-1]


def test_rays_control_store_has_a_store_of_its_own() -> None:
    head = services()["ray-head"]
    store = head["environment"]["RAY_REDIS_ADDRESS"].removesuffix(":6379")
    assert store in head["depends_on"]
    assert store not in services()["launcher"]["environment"]["BATON_REDIS_URL"]
    assert "volumes" not in services()[store], "it ends with its cluster"
    (password,) = re.findall(r"--redis-password=(\S+)", " ".join(head["command"]))
    assert password == services()[store]["environment"]["RAY_STORE_PASSWORD"].split()[0]
    assert password.startswith("${RAY_STORE_PASSWORD:?")


def test_rays_parts_know_each_other_by_a_token() -> None:
    for name in BATON:
        given = services()[name]["environment"]
        if name == "router":
            assert not any(variable.startswith("RAY_") for variable in given)
        else:
            assert given["RAY_AUTH_MODE"] == "token"
            assert given["RAY_AUTH_TOKEN"].startswith("${RAY_TOKEN:?")


def test_batons_parts_know_each_other_by_a_secret_that_the_store_never_has() -> None:
    for name in ("launcher", "router"):
        secret = services()[name]["environment"]["BATON_CLUSTER_SECRET"]
        assert secret.startswith("${CLUSTER_SECRET:?"), name


def test_a_check_of_a_port_follows_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        for listens in (False, True):
            if listens:
                server.listen()
            for name, usual in (("ray-head", 6379), ("decode", 9301)):
                mode, _, *arguments = services()[name]["healthcheck"]["test"]
                assert mode == "CMD"
                *flags, script = arguments
                # A container's name is its address; this machine's may be none.
                assert f"(s.gethostname(), {usual})" in script
                script = script.replace(f"(s.gethostname(), {usual})", f"('127.0.0.1', {port})")
                done = subprocess.run(
                    [sys.executable, *flags, script],
                    timeout=_CHECK_S,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
                assert (done.returncode == 0) is listens


def test_targets_are_those_of_the_dockerfile() -> None:
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (FOLDER / "../../Dockerfile").read_text())
    for name in BATON:
        service = services()[name]
        assert service["build"]["target"] in stages
        assert service["image"] == f"baton:{service['build']['target']}"
        assert (service["image"] == "baton:cuda") is (name in PROFILES["gpu"])
        assert (service["image"] == "baton:router") is (name == "router")
        assert (FOLDER / service["build"]["context"] / "Dockerfile").is_file()


def test_each_worker_has_a_gpu_of_its_own() -> None:
    asked = []
    for name in PROFILES["gpu"]:
        (device,) = services()[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        asked += device["device_ids"]
    assert asked == ["${PREFILL_GPU:-0}", "${DECODE_GPU:-1}"]


def test_nothing_is_published_beyond_this_machine() -> None:
    published = [port for one in services().values() for port in one.get("ports", ())]
    assert len(published) == 6
    # Behind a TLS proxy other hosts may be allowed, explicitly.
    encrypted = [port for port in published if port.startswith("${LISTEN:-127.0.0.1}:${")]
    assert [port.rpartition(":")[2] for port in encrypted] == ["8443", "8444"]
    assert all(port.startswith("127.0.0.1:${") for port in {*published} - {*encrypted})
    assert {name for name, one in services().items() if "ports" in one} == {
        *("nginx", "prometheus", "grafana")
    }


def test_what_does_without_tls_is_on_networks_of_its_own() -> None:
    networks = compose()["networks"]
    assert networks["cluster"] == {"internal": True}
    members = {
        name: {one for one, service in services().items() if name in service["networks"]}
        for name in networks
    }
    assert members == {
        "edge": {"nginx", "router"},
        "cluster": {*BATON, "valkey", "ray-store", "prometheus"},
        "outside": {"launcher"},
        "watch": {"prometheus", "grafana"},
    }


def test_every_container_is_held_to_what_it_needs() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # Those are copied into the container, which a read-only one refuses.
        assert "secrets" not in service, name


def test_images_are_of_one_version() -> None:
    for name, service in services().items():
        if name not in BATON:
            assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", service["image"]), name


def test_what_is_mounted_is_there() -> None:
    named = set(compose()["volumes"])
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = re.sub(r"^\$\{MODELS:-(\S+?)\}", r"\1", volume).split(":")[0]
            assert source in named or (FOLDER / source).exists(), name


def test_variables_are_those_of_the_example() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text))
    given = set(re.findall(r"(?m)^([A-Z_]+)=", (FOLDER / "example.env").read_text()))
    assert used == given


def test_a_container_has_time_to_drain() -> None:
    drain_s = load_config(FOLDER / "baton.toml").drain_deadline_s
    for name in ("router", *NODES):
        given_s = int(services()[name]["stop_grace_period"].removesuffix("s"))
        # Workers may take 20 s more than that, and both must end.
        assert given_s >= drain_s + (45 if name == "router" else 65), name


def test_a_stream_outlasts_a_request() -> None:
    deadline_s = load_config(FOLDER / "baton.toml").request_deadline_s
    for what in ("proxy_read", "proxy_send", "grpc_read", "grpc_send", "client_body"):
        (seconds,) = re.findall(rf"{what}_timeout (\d+)s;", nginx())
        assert int(seconds) > deadline_s, what
    assert "proxy_buffering off;" in nginx()
    assert "proxy_http_version 1.1;" in nginx()
    assert 'proxy_set_header Connection "";' in nginx()


def test_the_proxy_takes_the_largest_upload() -> None:
    (mib,) = re.findall(r"client_max_body_size (\d+)m;", nginx())
    assert int(mib) << 20 > load_config(FOLDER / "baton.toml").max_file_bytes


@contextmanager
def store_of(service: str, folder: Path) -> Iterator[int]:
    """The port of a service's store.

    It runs by the very shell command, with the embedded server in place of the image's. The
    password of each variable is its name.
    """
    (folder / "valkey-server").symlink_to(valkey_binary())
    shell, flag, script = services()[service]["command"]
    port = free_port()
    script = script.replace("$$", "$").replace("save ", f"bind 127.0.0.1\nport {port}\nsave ", 1)
    for volume in services()[service].get("volumes", ()):
        source, inside, _ = volume.split(":")
        script = script.replace(inside, str(FOLDER / source))
    passwords = {name: name for name in services()[service]["environment"]}
    with subprocess.Popen(
        [shell, flag, script],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **passwords},
        cwd=folder,
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            yield port
        finally:
            server.terminate()
            assert server.wait(_DEADLINE_S) == 0


def test_each_role_is_another_user_of_the_store(tmp_path: Path) -> None:
    """A router's credentials open neither the store nor what belongs to the supervisor."""
    addresses = {
        "router": services()["router"]["environment"]["BATON_REDIS_URL"],
        "supervisor": services()["launcher"]["environment"]["BATON_REDIS_URL"],
        "worker": services()["launcher"]["environment"]["BATON_REDIS_WORKER_URL"],
    }
    for name in ("router", *NODES):
        told = " ".join(services()[name]["environment"].values())
        assert "SUPERVISOR_PASSWORD" not in told, name
        assert "WORKER_PASSWORD" not in told, name
    with store_of("valkey", tmp_path) as port:
        for user, address in addresses.items():
            url = re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", address)
            where = url.replace("@valkey:6379", f"@127.0.0.1:{port}")
            assert where != url
            with redis.Redis.from_url(where, retry=BRIEFLY) as client:
                assert client.ping()
                own = "baton:{c}:supervision"
                if user == "supervisor":
                    assert client.set(own, "x")
                    assert client.info("memory")["maxmemory_policy"] == "noeviction"
                    continue
                for command in (("SET", own, "x"), ("FLUSHALL",), ("CONFIG", "GET", "*")):
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        client.execute_command(*command)
        for password in (None, "SUPERVISOR_PASSWORD"):
            with (
                redis.Redis(port=port, password=password) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.ping()


def test_rays_store_takes_its_configuration(tmp_path: Path) -> None:
    with store_of("ray-store", tmp_path) as port:
        with redis.Redis(port=port, password="RAY_STORE_PASSWORD", retry=BRIEFLY) as client:
            asked = client.config_get("maxmemory*")
            assert isinstance(asked, dict)
            assert asked["maxmemory"] == str(1 << 30)
            assert asked["maxmemory-policy"] == "noeviction"
        with redis.Redis(port=port) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_prometheus_asks_all_parts_once() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    routers, parts = settings["scrape_configs"]
    (found,) = routers["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == (["router"], "A", 8000)
    assert "metrics_path" not in routers, "a router's own page"
    (asked,) = parts["http_sd_configs"]
    assert asked["url"] == "http://router:8000/metrics/targets"
    assert all(job["job_name"].startswith("baton-") for job in (routers, parts))
    mounted = [one.split(":") for one in services()["prometheus"]["volumes"]]
    (folder,) = [inside for source, inside, *_ in mounted if source == "../monitoring"]
    assert settings["rule_files"] == [f"{folder}/rules.yaml"]


def test_prometheus_takes_its_file(tmp_path: Path) -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["rule_files"] = []
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    command = [promtool(), "check", "config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_its_dashboards() -> None:
    (provider,) = yaml.safe_load((FOLDER / "grafana/providers/baton.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((FOLDER / "grafana/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    mounted = [one.split(":") for one in services()["grafana"]["volumes"]]
    (folder,) = [inside for where, inside, *_ in mounted if where == "../monitoring"]
    assert provider["options"]["path"] == f"{folder}/dashboards"
    assert source["url"] == "http://prometheus:9090"


def test_tls_ends_at_the_ports_that_are_published_for_it() -> None:
    for name, port in (("http", 8443), ("grpc", 8444)):
        assert f"include /etc/nginx/tls/{name}*.conf;" in nginx()
        example = (FOLDER / "tls" / f"{name}.conf.example").read_text()
        assert f"listen {port} ssl;" in example
    for name in ("launcher", "router"):
        assert services()[name]["environment"]["BATON_INSECURE_LISTEN"] == "true"


@pytest.mark.parametrize(
    "text",
    ["search dns.podman\nnameserver 10.89.0.1\nnameserver 9.9.9.9\n", "nameserver 10.89.0.1\n"],
)
def test_nginx_asks_the_dns_that_its_container_has(text: str, tmp_path: Path) -> None:
    """By the very shell command, with another program in nginx' place."""
    (tmp_path / "resolv.conf").write_text(text)
    (tmp_path / "nginx").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "nginx").chmod(0o755)
    shell, flag, script = services()["nginx"]["command"]
    script = script.replace("$$", "$").replace("/etc/", f"{tmp_path}/")
    done = subprocess.run(
        [shell, flag, script.replace("/tmp/resolver.conf", f"{tmp_path}/resolver.conf")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=_CHECK_S,
        check=True,
    )
    assert done.stdout == "-g daemon off;\n"
    made = (tmp_path / "resolver.conf").read_text()
    assert made == "resolver 10.89.0.1 valid=5s ipv6=off;\n"
    assert "include /tmp/resolver.conf;" in nginx()
