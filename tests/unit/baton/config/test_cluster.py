"""The configuration: where values come from, what is refused, that every field is explained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from baton.config.advanced import AdvancedConfig
from baton.config.autoscaler import AutoscalerConfig
from baton.config.cluster import Config, load_config
from baton.config.fields import split_host_port
from baton.config.pools import ContextClass, PoolConfig
from baton.errors import ConfigError

REQUIRED = {(PoolConfig, "name"), (PoolConfig, "role"), (ContextClass, "name")}
SECTIONS: list[type[BaseModel]] = [
    Config,
    PoolConfig,
    ContextClass,
    AutoscalerConfig,
    AdvancedConfig,
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine's own."""
    for name in list(os.environ):
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "baton.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_type_a_description_and_a_default(section: type[BaseModel]) -> None:
    hints = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        assert name in hints
        assert field.annotation is not None
        assert field.description, f"{section.__name__}.{name} is not described"
        assert field.description.rstrip().endswith("."), name
        has_default = field.default is not PydanticUndefined or field.default_factory is not None
        assert has_default is ((section, name) not in REQUIRED), name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_numbers_say_their_unit(section: type[BaseModel]) -> None:
    units = {"_s": "second", "_bytes": "bytes", "_mib": "MiB", "_tokens": "tokens"}
    for name, field in section.model_fields.items():
        for ending, unit in units.items():
            if name.endswith(ending):
                assert unit.lower() in (field.description or "").lower(), (
                    f"{section.__name__}.{name}"
                )


def test_the_defaults_are_those_of_the_design() -> None:
    config = load_config()
    assert config.block_size == 16
    assert [(c.name, c.max_tokens) for c in config.classes] == [
        ("short", 512),
        ("medium", 4096),
        ("long", None),
    ]
    assert [(pool.name, pool.role, pool.count) for pool in config.pools] == [
        ("prefill", "prefill", 1),
        ("decode", "decode", 1),
    ]
    assert all(pool.kv_pool_mib == 1024 for pool in config.pools)
    assert (config.advanced.lease_s, config.request_deadline_s) == (3.0, 300.0)
    assert (config.slo_ttft_s, config.slo_tpot_s) == (2.0, 0.1)
    assert (config.local_prefill, config.policy) == ("auto", "predictive")
    for address in (config.http, config.grpc):
        assert split_host_port(address)[0] == "127.0.0.1"


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path, 'block_size = 8\ndtype = "float32"\n[advanced]\nlease_s = 30.0\nhang_s = 2.0\n'
    )
    monkeypatch.setenv("BATON_ADVANCED__LEASE_S", "20")
    monkeypatch.setenv("BATON_DTYPE", "float16")
    config = load_config(file, dtype="bfloat16", slo_ttft_s=None, redis_url=None)
    assert (config.block_size, config.advanced.lease_s, config.dtype) == (8, 20.0, "bfloat16")
    assert config.advanced.hang_s == 2.0
    assert load_config().block_size == 16, "the file was remembered"


def test_lists_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [{"name": "p", "role": "prefill", "count": 3}, {"name": "d", "role": "decode"}]
    monkeypatch.setenv("BATON_POOLS", json.dumps(pools))
    assert [pool.count for pool in load_config().pools] == [3, 1]
    monkeypatch.setenv("BATON_POOLS", "[{")
    with pytest.raises(ConfigError, match="BATON_POOLS must be JSON"):
        load_config()


def test_a_file_with_pools_and_classes(tmp_path: Path) -> None:
    text = """
        [[pools]]
        name = "fast"
        role = "prefill"
        resources = { fast = 1.0 }
        [[pools]]
        name = "wide"
        role = "decode"
        count = 2
        max_sequences = 8
        [[classes]]
        name = "all"
    """
    config = load_config(write(tmp_path, text))
    assert config.pools[0].resources == {"fast": 1.0}
    assert (config.pools[1].count, config.pools[1].max_sequences) == (2, 8)
    assert config.class_of(10**9) == "all"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at"):
        load_config(tmp_path / "none.toml")


P, D = {"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"block_size": 0}, "--block-size must be at least 1, not `0`"),
        ({"block_size": "many"}, "--block-size must be a whole number, not `many`"),
        ({"dtype": "int3"}, "dtype"),
        ({"local_prefill": "sometimes"}, "--local-prefill must be auto, never or always"),
        ({"policy": "best"}, "policy"),
        ({"classes": [{"name": "a", "pools": ["x"]}]}, "a owns 'x', which is no pool"),
        (
            {"classes": [{"name": "a", "max_tokens": 9, "pools": ["decode"]}, {"name": "b"}]},
            "b has no decode pool: others own all",
        ),
        ({"http": "8000"}, "is not host:port"),
        ({"grpc": "host:99999"}, "is not host:port"),
        ({"advanced": {"lease_s": 0.0}}, "`advanced.lease_s` must be greater than 0"),
        ({"advanced": {"lease_s": 1.5}}, "at most half"),
        ({"advanced": {"registry_ttl_s": 1.9}}, "at most half"),
        ({"request_deadline_s": -1.0}, "--request-deadline-s must be greater than 0"),
        ({"unknown": 1}, "unknown"),
        ({"max_model_len": -1}, "--max-model-len must be at least 0"),
        ({"max_model_len": 15}, "max_model_len: 15 tokens are less than a KV block.*16"),
        (
            {"max_model_len": 16, "pools": [P, {**D, "block_size": 32}]},
            "less than a KV block of the pool d: set at least its block_size, 32",
        ),
        ({"pools": []}, "at least one decode pool is needed"),
        ({"pools": [P]}, "at least one decode pool is needed"),
        ({"pools": [D], "local_prefill": "never"}, "class short .* set auto, or give it"),
        (
            {"pools": [{**P, "count": 0}, D], "local_prefill": "never"},
            "class short .* set auto, or give it",
        ),
        (
            {"pools": [D], "classes": [{"name": "all", "local_prefill": "never"}]},
            "class all .* a count of at least 1",
        ),
        (
            {
                "pools": [P, D, {**P, "name": "q", "count": 0}],
                "classes": [{"name": "a", "local_prefill": "never", "pools": ["q"]}],
            },
            "class a .* a count of at least 1",
        ),
        ({"pools": [P, D, {**D, "role": "prefill"}]}, "names must differ"),
        ({"pools": [P, {**D, "count": 0}]}, "pool `d` .*: count must be at least 1 in a decode"),
        ({"pools": [P, {**D, "count": -1}]}, "pool `d` .*: `count` must be at least 0"),
        ({"pools": [P, {**D, "role": "both"}]}, "role"),
        ({"pools": [P, {**D, "gpu_memory_fraction": 1.1}]}, "gpu_memory_fraction"),
        ({"pools": [P, {**D, "unknown": 1}]}, "unknown"),
        ({"pools": [P, {"name": "d"}]}, "role"),
        ({"pools": [P, {**D, "block_size": 24}]}, "d has a block_size of 24.*cluster's 16"),
        ({"pools": [P, {**D, "block_size": 8}]}, "multiple of the cluster's 16"),
        ({"pools": [P, {**D, "kv_dtype": "int4"}]}, "kv_dtype"),
        (
            {"deterministic": True, "pools": [P, {**D, "kv_dtype": "fp8"}]},
            "deterministic needs one kv_dtype.*p bfloat16, d fp8",
        ),
        ({"classes": []}, "the last class has none"),
        ({"classes": [{"name": "a", "max_tokens": 5}]}, "the last class has none"),
        ({"classes": [{"name": "a"}, {"name": "b"}]}, "must rise"),
        (
            {
                "classes": [
                    {"name": "a", "max_tokens": 9},
                    {"name": "b", "max_tokens": 9},
                    {"name": "c"},
                ]
            },
            "must rise",
        ),
    ],
)
def test_bad_values_are_refused_by_name(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(**flags)


def test_every_field_at_fault_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(block_size=0, dtype="x", slo_ttft_s=-1.0)
    assert [line.split()[0] for line in caught.value.message.splitlines()] == [
        "--dtype",
        "--block-size",
        "--slo-ttft-s",
    ]


def test_an_unknown_field_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        load_config(write(tmp_path, "blok_size = 16\n"))


def test_it_travels_as_json() -> None:
    config = load_config(
        block_size=32, classes=[{"name": "a", "max_tokens": 7}, {"name": "b"}], pools=[P, D]
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_pool_takes_what_the_cluster_has() -> None:
    config = load_config(block_size=32, kv_dtype="fp8", pools=[P, {**D, "block_size": 96}])
    assert [config.block_size_of(pool) for pool in config.pools] == [32, 96]
    assert [config.kv_dtype_of(pool) for pool in config.pools] == ["fp8", "fp8"]
    assert config.lossiest_kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("cluster", "pool", "lossiest"),
    [
        ({}, {}, "bfloat16"),
        ({"dtype": "float32"}, {}, "float32"),
        ({"dtype": "float32"}, {"kv_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, {"kv_dtype": "float32"}, "bfloat16"),
        ({}, {"kv_dtype": "int8"}, "int8"),
        ({"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, "fp8"),
        ({"kv_dtype": "fp8"}, {"kv_dtype": "int8"}, "fp8"),
        ({"kv_dtype": "int8"}, {"kv_dtype": "float16"}, "int8"),
    ],
)
def test_the_lossiest_kv_type_is_that_of_all_pools(
    cluster: dict[str, Any], pool: dict[str, Any], lossiest: str
) -> None:
    for pools in ([P, D | pool], [P | pool, D]):
        assert load_config(**cluster, pools=pools).lossiest_kv_dtype == lossiest


def test_deterministic_pools_may_differ_in_block_size() -> None:
    config = load_config(deterministic=True, pools=[P, {**D, "block_size": 32}])
    assert config.deterministic


def test_it_cannot_be_changed() -> None:
    config = load_config()
    with pytest.raises(ValidationError):
        config.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(0, "short"), (512, "short"), (513, "medium"), (4096, "medium"), (4097, "long")],
)
def test_a_prompts_class(tokens: int, name: str) -> None:
    assert load_config().class_of(tokens) == name


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_host_port(address) == parts


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536"])
def test_what_is_no_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_host_port(address)


def test_a_smaller_model_is_named_where_one_drafts() -> None:
    with pytest.raises(ConfigError, match="draft needs a draft_model"):
        load_config(drafter="draft")
    assert load_config(drafter="draft", draft_model="small").draft_model == "small"


def test_peaks_go_together() -> None:
    known = PoolConfig(name="p", role="prefill", peak_gflops=500.0, peak_gb_per_s=40.0)
    assert known.peak_gflops == 500.0
    for one in ({"peak_gflops": 1.0}, {"peak_gb_per_s": 1.0}):
        with pytest.raises(ValidationError, match="go together"):
            PoolConfig.model_validate({"name": "p", "role": "prefill", **one})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"min_prefill": 3, "max_prefill": 2}, "max_prefill"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers"),
        ({"min_prefill": 2, "min_decode": 2, "max_workers": 3}, "min_prefill"),
        ({"min_workers": 9, "max_prefill": 4, "max_decode": 4}, "min_workers"),
        ({"enabled": True, "min_prefill": 2}, "fewer workers than its minimum"),
        ({"min_decode": 0}, "min_decode"),
        ({"interval_s": 0}, "interval_s"),
    ],
)
def test_an_autoscalers_bounds_must_leave_something(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Config(autoscaler=fields)


def test_an_autoscaler_is_off_and_knows_one_pool_of_each_role() -> None:
    assert not Config().autoscaler.enabled
    pools = [PoolConfig(name=name, role="prefill") for name in ("p", "q")]
    three = (*pools, PoolConfig(name="d", role="decode"))
    assert len(Config(pools=three).pools) == 3
    with pytest.raises(ValidationError, match="one prefill pool"):
        Config(pools=three, autoscaler={"enabled": True})


def test_a_cluster_needs_no_prefill_worker_unless_a_class_does() -> None:
    empty = PoolConfig.model_validate({**P, "count": 0})
    decode = PoolConfig.model_validate(D)
    for pools in ((decode,), (empty, decode)):
        config = Config(pools=pools)
        assert (config.computes_locally, config.needs_prefill) == (True, False)
    own = [{"name": "all", "local_prefill": "auto"}]
    only = {"pools": [D], "local_prefill": "never", "classes": own}
    assert Config.model_validate(only).computes_locally
    mixed = [{"name": "a", "max_tokens": 9, "local_prefill": "never"}, {"name": "b"}]
    config = Config.model_validate({"pools": [P, D], "classes": mixed})
    assert (config.computes_locally, config.needs_prefill) == (True, True)


def test_an_autoscaler_may_begin_without_a_prefill_worker() -> None:
    pools = (PoolConfig.model_validate({**P, "count": 0}), PoolConfig.model_validate(D))
    found = Config(pools=pools, autoscaler={"enabled": True, "min_prefill": 0})
    assert found.autoscaler.min_prefill == 0
    with pytest.raises(ValidationError, match="may have a count of 0"):
        Config(pools=pools[1:], autoscaler={"enabled": True, "min_prefill": 0})
    with pytest.raises(ValidationError, match="min_prefill is 0, and local_prefill never"):
        Config(local_prefill="never", autoscaler={"enabled": True, "min_prefill": 0})


def test_an_autoscaler_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_AUTOSCALER__ENABLED", "true")
    monkeypatch.setenv("BATON_AUTOSCALER__DRY_RUN", "true")
    found = load_config().autoscaler
    assert (found.enabled, found.dry_run, found.cooldown_s) == (True, True, 60.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ray_address": "a:6379"}, "need a redis_url that they reach"),
        ({"ray_address": "a", "redis_url": "redis://b"}, "a"),
        ({"ray_address": "auto", "redis_url": "redis://b", "gcs_store": "embedded"}, "gcs_store"),
        ({"routers": 0}, "no router would serve"),
        ({"leave_workers": True}, "needs a ray_address"),
        ({"batch_store": "/mnt/batches"}, "batch_store: it needs a redis_url"),
        ({"batch_store": "s3://a-bucket", "redis_url": "redis://b"}, "it needs a cluster_id"),
        ({"batch_store": "batches"}, "neither an absolute path nor s3://bucket/prefix"),
        ({"batch_store": "s3://Bad_Bucket"}, "neither an absolute path nor s3://bucket/prefix"),
        ({"batch_store": "https://bucket"}, "neither an absolute path nor s3://bucket/prefix"),
        (
            {"ray_address": "auto", "redis_url": "redis://b", "leave_workers": True},
            "needs a cluster_id",
        ),
    ],
)
def test_a_cluster_of_several_machines_has_what_it_needs(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(**flags)


def test_the_launcher_of_several_machines_may_leave_routers_to_others() -> None:
    config = load_config(ray_address="10.0.0.1:6379", redis_url="redis://10.0.0.1", routers=0)
    assert config.routers == 0


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"transport": "nixl"}, r"transport nixl: use tp 1, or one of auto, shm, grpc"),
        ({"decode": {"kv_dtype": "int8"}}, "unequal kv_dtype"),
        ({"decode": {"block_size": 32}}, "unequal block_size"),
    ],
)
def test_ranks_exchange_blocks_that_are_alike(fields: dict[str, Any], fault: str) -> None:
    decode = {"name": "decode", "role": "decode", **fields.pop("decode", {})}
    pools = [{"name": "prefill", "role": "prefill", "tp": 2}, decode]
    Config(pools=[pools[0], {"name": "decode", "role": "decode"}])
    with pytest.raises(ValidationError, match=fault):
        Config(pools=pools, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"deterministic": True}, "does not work with deterministic: use tp 1, or leave"),
        ({"kv_disk_mib": 5}, "use tp 1, or take kv_disk_mib 0"),
        ({"drafter": "draft", "draft_model": "m"}, "take drafter ngram or none"),
    ],
)
def test_what_several_ranks_do_not_do_is_refused(fields: dict[str, Any], says: str) -> None:
    pools = (PoolConfig(name="p", role="prefill", tp=2), PoolConfig(name="d", role="decode"))
    with pytest.raises(ValidationError, match=says):
        Config(pools=pools, **fields)
    assert Config(pools=pools).ranks == 3


@pytest.mark.parametrize(
    ("pool", "fields", "says"),
    [
        ({"tp": 2}, {}, "does not work with tp above 1: use cp 1, or take tp 1"),
        ({"role": "decode"}, {}, "give cp to a prefill pool"),
        ({}, {"autoscaler": {"enabled": True}}, "leave autoscaler out"),
        ({}, {"deterministic": True}, "leave deterministic out"),
        ({}, {"kv_host_mib": 5}, "take kv_host_mib 0"),
        ({}, {"drafter": "draft", "draft_model": "m"}, "take drafter ngram or none"),
    ],
)
def test_what_ranks_that_divide_prompts_do_not_do_is_refused(
    pool: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    long = {"name": "long", "role": "prefill", "cp": 4, "count": 2}
    others = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    assert Config(pools=[long, *others]).ranks == 10
    pools = [long, long | {"name": "longer"} | pool, *others]
    if "autoscaler" in fields:
        # It knows two pools.
        pools = [long, others[1]]
    with pytest.raises(ValidationError, match=says):
        Config(pools=pools, **fields)
