"""What is said of a wrong configuration: where it is written, and what to write instead."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from baton.config.access import KeyConfig, TenantConfig
from baton.config.advanced import AdvancedConfig
from baton.config.autoscaler import AutoscalerConfig
from baton.config.cluster import Config, load_config
from baton.config.errors import _MUST_BE, plain_faults
from baton.config.pools import ContextClass, PoolConfig
from baton.config.sources import Flag
from baton.config.tls import TlsConfig
from baton.errors import ConfigError

PYDANTIC_WORDS = ("Input", "Extra inputs", "Field required", "Value error", "pydantic")
TABLES: dict[str, type[BaseModel]] = {
    "autoscaler": AutoscalerConfig,
    "advanced": AdvancedConfig,
    "tls": TlsConfig,
    "pools": PoolConfig,
    "classes": ContextClass,
    "tenants": TenantConfig,
    "keys": KeyConfig,
}
WRONG = ("~", "", -1e12, 1e12, 2.5, 7, True, math.inf, None, {"a": 1}, ["~", 3], "9" * 5000)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)


def faults_of(folder: Path, text: str, *flags: Flag, **values: Any) -> list[str]:
    """The lines of the error, with the file's name alone."""
    file = folder / "baton.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags, **values)
    return caught.value.message.replace(f"{folder}/", "").splitlines()


def wrong_configurations() -> Iterator[dict[str, Any]]:
    """Every field of every table with every wrong value, and without it."""
    for wrong in WRONG:
        for name in Config.model_fields:
            yield {name: wrong}
        for table, model in TABLES.items():
            for name in model.model_fields:
                entry = {"name": "n", "role": "decode"} if table == "pools" else {"name": "n"}
                if table in ("autoscaler", "advanced", "tls"):
                    yield {table: {name: wrong}}
                else:
                    yield {table: [{**entry, name: wrong}]}
    yield {"pools": [{}]}
    yield {"pools": [{"unknown": 1}]}
    yield {"unknown": 1}


def test_every_fault_that_a_field_can_have_is_put_in_words() -> None:
    kinds = set()
    for values in wrong_configurations():
        try:
            Config(**values)
        except ValidationError as error:
            kinds |= {fault["type"] for fault in error.errors()}
            lines = plain_faults(error, Config)
        else:
            continue
        assert lines
        for line in lines:
            assert not any(words in line for words in PYDANTIC_WORDS), line
    assert kinds - set(_MUST_BE) == {"extra_forbidden", "missing", "value_error"}
    assert len(kinds) > 15, "too few kinds of faults were tried"


def test_a_kind_of_fault_without_words_still_reads_as_english() -> None:
    class Strange(BaseModel):
        url: bytes

    with pytest.raises(ValidationError) as caught:
        Strange.model_validate({"url": 3.5})
    assert plain_faults(caught.value, Strange) == ["`url` is not valid: it should be a valid bytes"]


def test_a_file_s_faults_name_file_and_line_and_what_was_meant(tmp_path: Path) -> None:
    text = """# A comment.
modle = "x"
policy = "best"
http = "8000"

[[pools]]
name = "prefill"
role = "prefil"

[[pools]]
name = "decode"
role = "decode"
cout = 2

[[pools]]
role = "decode"

[tls]
foldr = "y"
"""
    assert faults_of(tmp_path, text) == [
        "baton.toml:4: `http`: '8000' is not host:port",
        "baton.toml:19: unknown field `foldr`; did you mean `folder`?",
        "baton.toml:3: `policy` must be predictive, round_robin, least_loaded, prefix,"
        " power_of_two or session, not `best`",
        "pool `prefill` (baton.toml:8): `role` must be prefill or decode, not `prefil`",
        "pool `decode` (baton.toml:13): unknown field `cout`; did you mean `count`?",
        "baton.toml:15: `pools[2].name` is missing",
        "baton.toml:2: unknown field `modle`; did you mean `model`?",
    ]


def test_the_line_is_that_in_which_a_value_begins(tmp_path: Path) -> None:
    text = 'allowed_hosts = [\n  "a",\n  3,\n]\nredis_url = """\ndtype = "x"\n"""\ndtype = "int3"\n'
    assert faults_of(tmp_path, text) == [
        "baton.toml:8: `dtype` must be bfloat16, float32 or float16, not `int3`",
        "baton.toml:1: `allowed_hosts[1]` must be text in quotes, not `3`",
    ]


def test_tables_that_are_not_pools_go_by_name_too(tmp_path: Path) -> None:
    text = """[[classes]]
name = "short"
max_tokens = 2.5
[[tenants]]
name = "team"
wait = 3
[[keys]]
name = "one"
tenant = "default"
scopes = ["inferrence"]
"""
    assert faults_of(tmp_path, text) == [
        "class `short` (baton.toml:3): `max_tokens` must be a whole number, not `2.5`",
        "tenant `team` (baton.toml:6): unknown field `wait`; did you mean `weight`?",
        "key `one` (baton.toml:10): `scopes[0]` must be inference, metrics or admin",
    ]


def test_a_variable_s_fault_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "count": -1}]
    for name, value in {
        "BATON_POLICY": "best",
        "BATON_AUTOSCALER__INTERVAL_S": "x",
        "BATON_AUTOSCALER__ENABLD": "true",
        "BATON_POOLS": json.dumps(pools),
        "BATON_TENANTS": "[{",
    }.items():
        monkeypatch.setenv(name, value)
    lines = faults_of(tmp_path, 'policy = "worse"\n')
    assert lines[0].startswith("BATON_TENANTS must be JSON: ")
    assert lines[1:] == [
        "BATON_POLICY must be predictive, round_robin, least_loaded, prefix, power_of_two or"
        " session, not `best`",
        "pool `d` (BATON_POOLS): `count` must be at least 0, not `-1`",
        "BATON_AUTOSCALER__INTERVAL_S must be a number, not `x`",
        "BATON_AUTOSCALER__ENABLD: unknown field `enabld`; did you mean `enabled`?",
    ]


def test_a_flag_s_fault_names_the_flag(tmp_path: Path) -> None:
    lines = faults_of(
        tmp_path,
        'policy = "worse"\n',
        Flag("--decode", ("count",), -1, "decode"),
        Flag("--max-sequences", ("max_sequences",), 0, "all"),
        Flag("--certs", ("tls", "folder"), 3),
        policy="best",
    )
    assert lines == [
        "--certs must be text in quotes, not `3`",
        "--policy must be predictive, round_robin, least_loaded, prefix, power_of_two or"
        " session, not `best`",
        "--max-sequences must be at least 1, not `0`",
        "--decode must be at least 0, not `-1`",
    ]


def test_only_prefill_pools_may_be_empty(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "", Flag("--decode", ("count",), 0, "decode")) == [
        "pool `decode` (--decode): count must be at least 1 in a decode pool"
    ]
    prefill = Flag("--prefill", ("count",), 0, "prefill")
    assert load_config(None, [prefill]).pools[0].count == 0
    (fault,) = faults_of(tmp_path, 'local_prefill = "never"\n', prefill)
    assert "set auto, or give it a prefill pool with a count of at least 1" in fault


def test_fields_that_contradict_each_other_are_said_with_what_has_set_them(tmp_path: Path) -> None:
    chunk = Flag("--chunk-tokens", ("chunk_tokens",), 10, "prefill")
    assert faults_of(tmp_path, "", chunk) == [
        "pool `prefill` (--chunk-tokens): chunk_tokens must be 0 or at least max_sequences"
    ]
    assert faults_of(tmp_path, "[autoscaler]\nmin_prefill = 3\nmax_prefill = 2\n") == [
        "baton.toml:1: `autoscaler`: max_prefill must be 0 or at least min_prefill"
    ]
    assert faults_of(tmp_path, "[advanced]\nheartbeat_s = 3\n") == [
        "advanced.heartbeat_s must be at most half of advanced.registry_ttl_s and of"
        " advanced.lease_s"
    ]


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    text = 'redis_url = 5555\n[[keys]]\nname = "a"\ntenant = "default"\nsha256 = "baton-secret"\n'
    lines = faults_of(tmp_path, text)
    assert lines == [
        "baton.toml:1: `redis_url` must be text in quotes",
        "key `a` (baton.toml:5): `sha256` must be 64 hexadecimal digits in lower case, or empty",
    ]


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    (line,) = faults_of(tmp_path, f'dtype = "{"x" * 500}"\n')
    assert len(line) < 160


@pytest.mark.parametrize(
    "text",
    [
        'keys = ["sk-secret"]',
        'keys = "sk-secret"',
        '[[keys]]\nname = "ann"\npriority = "sk-secret"',
        '[[keys]]\nname = "ann"\nsha256 = "sk-secret"',
        "gcs_store = ['sk-secret']\nredis_url = ['sk-secret']",
        "[gcs_store]\npassword = 'sk-secret'",
        "otlp_endpoint = 5550123",
        "otlp_endpoint = 'sk-secret'",
    ],
)
def test_what_may_be_a_secret_is_not_repeated(tmp_path: Path, text: str) -> None:
    (line, *_) = lines = faults_of(tmp_path, text)
    assert "baton.toml:" in line
    for secret in ("sk-secret", "5550123"):
        assert not any(secret in one for one in lines), lines
