"""What workers read of the configuration is in their hash, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from baton.config.access import KeyConfig, TenantConfig
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.tls import TlsConfig
from baton.config.worker_fields import SHARED_FIELDS, WORKER_FIELDS, shared_hash, workers_hash

ROOT = Path(__file__).parents[4]
FOLDERS = ("worker", "prefill_worker", "decode_worker", "deploy/workers")
WITHOUT = ("engine", "kvtransfer")
"""They get single values, never the configuration."""
OF_OTHERS = {"ray_address"}
"""Fields that these folders read on behalf of the supervisor: ActorSettings.is_on_one_machine."""
NESTED = {"advanced", "tls"}
CONFIG = "config"
NAMES = (CONFIG, "_config")


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def is_config(node: ast.expr) -> bool:
    """Whether an expression is named like a Config: ``config``, ``….config`` or ``…._config``."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
    return name in NAMES


def step(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the name of ``object.name`` or ``object["name"]``."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.value, str(node.slice.value)
    return None


def fields_of_members(kind: type[BaseModel], file: str) -> dict[str, set[str]]:
    """The fields that each method and property of a part of the configuration reads."""
    tree = ast.parse((ROOT / "baton/config" / file).read_text())
    of_class = next(
        one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind.__name__
    )
    members = {one.name: one for one in of_class.body if isinstance(one, ast.FunctionDef)}

    def read(name: str) -> set[str]:
        if name in kind.model_fields:
            return {name}
        if name not in members:
            return set()
        found: set[str] = set()
        for node in ast.walk(members[name]):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                found |= read(node.attr)
        return found

    return {name: read(name) for name in (*kind.model_fields, *members)}


CONFIG_MEMBERS = fields_of_members(Config, "cluster.py")
TLS_MEMBERS = fields_of_members(TlsConfig, "tls.py")


def reads(tree: ast.AST) -> set[str]:
    """The fields that a module reads, as ``name`` or ``section.name``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        outer = step(node)
        if outer is None:
            continue
        value, name = outer
        inner = step(value)
        if inner is not None and is_config(inner[0]) and inner[1] in NESTED:
            names = TLS_MEMBERS.get(name, set()) if inner[1] == "tls" else {name}
            found |= {f"{inner[1]}.{one}" for one in names}
        elif is_config(value):
            found |= CONFIG_MEMBERS.get(name, set())
    return found - NESTED


def listed() -> set[str]:
    names: set[str] = set()
    for name, parts in WORKER_FIELDS.items():
        names |= {f"{name}.{part}" for part in parts} if name in NESTED else {name}
    return names


def test_every_field_that_workers_read_is_listed() -> None:
    found = {name for _, tree in trees(*FOLDERS) for name in reads(tree)}
    assert found - OF_OTHERS <= listed()
    assert found >= OF_OTHERS, "an exception that is none any more"


def test_every_listed_field_is_read_by_workers() -> None:
    found = {name for _, tree in trees(*FOLDERS) for name in reads(tree)}
    # The launcher makes the model's name and the store's address of these. Tracing, which routers
    # use too, gets the whole configuration.
    others = {"served_model_name", "tls.redis_ca", "otlp_endpoint", "trace_ratio"}
    assert listed() - found == others


def test_a_config_has_no_other_name_in_workers() -> None:
    """Otherwise the two tests above would overlook what is read of it."""
    for path, tree in trees(*FOLDERS):
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and getattr(node.annotation, "id", "") == "Config":
                assert node.arg in NAMES, path
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    assert not is_config(node.value) or is_config(target), path
    for path, tree in trees(*WITHOUT):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "baton.config.cluster", path


def test_the_reader_of_code_finds_each_way_to_read() -> None:
    source = """
a = settings.config.dtype
b = self._settings.config["log_level"]
c = config.advanced.lease_s
d = config["advanced"]["standby"]
e = config.tls.of("worker")
f = config.kv_dtype_of(pool)
g = other.redis_url
"""
    assert reads(ast.parse(source)) == {
        *("dtype", "log_level", "advanced.lease_s", "advanced.standby"),
        *("tls.folder", "kv_dtype"),
    }


BASE: Mapping[str, Any] = {
    "redis_url": "redis://127.0.0.1:6379/0",
    "tenants": (TenantConfig(name="a"),),
    "cluster_id": "c",
}
OTHER_POOL = PoolConfig(name="decode", role="decode", max_sequences=7)
KEY = KeyConfig(name="k", sha256="0" * 64, tenant="a")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_waiting_requests": 7},
        {"max_queue_s": 7.0},
        {"admission": "slo"},
        {"policy": "round_robin"},
        {"local_prefill": "never"},
        {"max_body_bytes": 4096},
        {"log_requests": True},
        {"slo_ttft_s": 7.0},
        {"routers": 7},
        {"http": "127.0.0.1:7"},
        {"request_deadline_s": 7.0},
        {"keys": (KEY,)},
        {"require_key": True},
        {"tenants": (TenantConfig(name="b"), TenantConfig(name="a", weight=7.0))},
        {"tls": TlsConfig(clear_kv=True)},
        {"advanced": {"slow_client_s": 7.0, "max_connections_per_client": 7}},
        {"redis_worker_url": "redis://127.0.0.1:6379/0", "redis_url": "redis://:new@127.0.0.1/0"},
    ],
)
def test_what_routers_alone_read_replaces_no_worker(changes: dict[str, Any]) -> None:
    assert workers_hash(Config(**{**BASE, **changes})) == workers_hash(Config(**BASE))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"dtype": "float32"},
        {"served_model_name": "m"},
        {"pools": (PoolConfig(name="decode", role="decode", kv_pool_mib=7),)},
        {"tenants": (TenantConfig(name="a", max_pinned_fraction=0.5),)},
        {"tls": TlsConfig(redis_ca="/ca.pem")},
        {"advanced": {"lease_s": 7.0}},
        {"cluster_secret": "s" * 32},
        {"redis_url": "redis://127.0.0.1:6380/0"},
        {"redis_url": "redis://:new@127.0.0.1:6379/0"},
    ],
)
def test_what_workers_read_replaces_them(changes: dict[str, Any]) -> None:
    assert workers_hash(Config(**{**BASE, **changes})) != workers_hash(Config(**BASE))


def test_another_version_replaces_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers_hash(Config(**BASE))
    monkeypatch.setattr("baton.config.worker_fields.VERSION", "9.9.9")
    assert workers_hash(Config(**BASE)) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"pools": (PoolConfig(name="prefill", role="prefill"), OTHER_POOL)},
        {"slo_tpot_s": 7.0},
        {"advanced": {"lease_s": 7.0}},
        {"log_level": "debug"},
        {"redis_url": "redis://:new@127.0.0.1:6379/0"},
        {"redis_url": "redis://u@127.0.0.1:6379/0?password_file=/p"},
    ],
)
def test_workers_of_both_configurations_serve_together(changes: dict[str, Any]) -> None:
    assert shared_hash(Config(**{**BASE, **changes})) == shared_hash(Config(**BASE))
    assert workers_hash(Config(**{**BASE, **changes})) != workers_hash(Config(**BASE))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"block_size": 32},
        {"cluster_secret": "s" * 32},
        {"pools": (PoolConfig(name="all", role="decode"),)},
        {"redis_url": "redis://127.0.0.1:6380/0"},
        {"redis_url": "redis://127.0.0.1:6379/1"},
    ],
)
def test_workers_that_cannot_serve_together(changes: dict[str, Any]) -> None:
    assert shared_hash(Config(**{**BASE, **changes})) != shared_hash(Config(**BASE))


def test_what_all_agree_in_is_read_by_workers() -> None:
    assert WORKER_FIELDS.keys() >= SHARED_FIELDS
