"""deploy/compose/: valid, closed to the outside, and fit for what Baton can do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from baton.config import load_config
from deploy.ports import free_port
from deploy.valkey import valkey_binary
from tests.unit.deploy.baton_commands import parse, unknown_variables

FOLDER = Path(__file__).parents[3] / "deploy" / "compose"
PROFILES = {"baton-cpu": "cpu", "baton-gpu": "gpu"}
NEVER = Retry(NoBackoff(), 0)
BRIEFLY = Retry(ConstantBackoff(0.02), 500)
"""Until a server that starts is there."""
_DEADLINE_S = 20.0


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


def test_every_profile_has_one_baton_and_all_else() -> None:
    for name, service in services().items():
        assert service.get("profiles", []) == ([PROFILES[name]] if name in PROFILES else [])
    for name in PROFILES:
        baton = services()[name]
        assert all("baton" in baton["networks"][of]["aliases"] for of in ("edge", "watch"))
        assert services()["nginx"]["depends_on"][name]["required"] is False


@pytest.mark.parametrize("name", PROFILES)
def test_baton_takes_its_command_line_and_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services()[name]
    parsed = parse(service["command"])
    assert parsed.name == "up"
    assert unknown_variables(list(service["environment"])) == []
    (local,) = [one for one in service["volumes"] if one.endswith(":ro")]
    file, inside, _ = local.split(":")
    assert str(parsed.parameters["config"]) == inside
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    config = load_config(FOLDER / file)
    assert config.routers == 2
    assert {pool.role for pool in config.pools} == {"prefill", "decode"}
    asked = {pool.resources.get("GPU", 0) for pool in config.pools}
    assert asked == ({1} if name == "baton-gpu" else {0})


def test_targets_are_those_of_the_dockerfile() -> None:
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (FOLDER / "../../Dockerfile").read_text())
    for name in PROFILES:
        build = services()[name]["build"]
        assert build["target"] in stages
        assert (FOLDER / build["context"] / "Dockerfile").is_file()


def test_nothing_is_published_beyond_this_machine() -> None:
    published = [port for one in services().values() for port in one.get("ports", ())]
    assert len(published) == 6
    # Where TLS ends others may be let in, by those who say so.
    encrypted = [port for port in published if port.startswith("${LISTEN:-127.0.0.1}:${")]
    assert [port.rpartition(":")[2] for port in encrypted] == ["8443", "8444"]
    assert all(port.startswith("127.0.0.1:${") for port in {*published} - {*encrypted})
    assert all("ports" not in services()[name] for name in (*PROFILES, "valkey"))
    assert compose()["networks"]["store"] == {"internal": True}


def test_every_container_is_held_to_what_it_needs() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # Those are copied into the container, which a read-only one refuses.
        assert "secrets" not in service, name


def test_images_are_of_one_version() -> None:
    for name, service in services().items():
        if name not in PROFILES:
            assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", service["image"]), name


def test_what_is_mounted_is_there() -> None:
    named = set(compose()["volumes"])
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            # The folder of rules and dashboards is written elsewhere.
            assert source in named or source == "../monitoring" or (FOLDER / source).exists(), name


def test_variables_are_those_of_the_example() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text))
    given = set(re.findall(r"(?m)^([A-Z_]+)=", (FOLDER / "example.env").read_text()))
    assert used == given


def test_a_container_has_time_to_drain() -> None:
    for name, profile in PROFILES.items():
        drain_s = load_config(FOLDER / f"{profile}.toml").drain_deadline_s
        assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= drain_s + 45


def test_a_stream_outlasts_a_request() -> None:
    deadline_s = load_config(FOLDER / "cpu.toml").request_deadline_s
    for what in ("proxy_read", "proxy_send", "grpc_read", "grpc_send", "client_body"):
        (seconds,) = re.findall(rf"{what}_timeout (\d+)s;", nginx())
        assert int(seconds) > deadline_s, what
    assert "proxy_buffering off;" in nginx()
    assert "proxy_http_version 1.1;" in nginx()
    assert 'proxy_set_header Connection "";' in nginx()


def test_the_proxy_takes_the_largest_upload() -> None:
    (mib,) = re.findall(r"client_max_body_size (\d+)m;", nginx())
    assert int(mib) << 20 > load_config(FOLDER / "cpu.toml").file_most_bytes


def test_the_proxy_hides_metrics() -> None:
    assert re.search(r"location /metrics \{\s*return 404;", nginx())


def test_valkey_takes_its_configuration(tmp_path: Path) -> None:
    """By the very shell command, with the embedded server in its place."""
    (tmp_path / "valkey-server").symlink_to(valkey_binary())
    shell, flag, script = services()["valkey"]["command"]
    port = free_port()
    script = script.replace("$$", "$").replace("save ", f"bind 127.0.0.1\nport {port}\nsave ", 1)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VALKEY_PASSWORD": "example"}
    command = [shell, flag, script]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as server:
        try:
            with redis.Redis(port=port, password="example", retry=BRIEFLY) as client:
                assert client.ping()
                asked = client.config_get("maxmemory*")
                assert isinstance(asked, dict)
                assert asked["maxmemory"] == str(1 << 30)
                assert asked["maxmemory-policy"] == "noeviction"
            with (
                redis.Redis(port=port) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.ping()
        finally:
            server.terminate()
            assert server.wait(_DEADLINE_S) == 0


def test_prometheus_asks_for_the_one_page() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "baton-cluster"
    assert job["metrics_path"] == "/metrics/cluster"
    assert job["static_configs"] == [{"targets": ["baton:8000"]}]
    mounted = [one.split(":") for one in services()["prometheus"]["volumes"]]
    (folder,) = [inside for source, inside, *_ in mounted if source == "../monitoring"]
    assert settings["rule_files"] == [f"{folder}/rules.yaml"]


def test_prometheus_takes_its_file(tmp_path: Path) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["rule_files"] = []
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    command = [found, "check", "config", str(file)]
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
    for name in PROFILES:
        assert services()[name]["environment"]["BATON_INSECURE_LISTEN"] == "true"
