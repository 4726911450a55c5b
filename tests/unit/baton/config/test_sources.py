"""Where values come from, which of them count, and how they are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.config.cluster import Config, load_config
from baton.config.sources import FileSource, Flag, unknown_variables
from baton.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "baton.toml"
    file.write_text(text)
    return file


POOLS = """
[[pools]]
name = "p"
role = "prefill"
max_sequences = 8

[[pools]]
name = "d"
role = "decode"
count = 2
max_sequences = 8

[[pools]]
name = "e"
role = "decode"
"""


def test_flags_for_pools_lie_over_those_of_the_file(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, POOLS),
        [
            Flag("--prefill", ("count",), 5, "prefill"),
            Flag("--max-sequences", ("max_sequences",), 16, "all"),
        ],
    )
    assert [(pool.name, pool.count, pool.max_sequences) for pool in config.pools] == [
        ("p", 5, 16),
        ("d", 2, 16),
        ("e", 1, 16),
    ]


def test_flags_for_pools_lie_over_the_usual_ones_and_over_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Flag("--decode", ("count",), 3, "decode")
    assert [pool.count for pool in load_config(None, [decode]).pools] == [1, 3]
    monkeypatch.setenv(
        "BATON_POOLS", '[{"name": "d", "role": "decode"}, {"name": "p", "role": "prefill"}]'
    )
    assert [(pool.name, pool.count) for pool in load_config(None, [decode]).pools] == [
        ("d", 3),
        ("p", 1),
    ]


def test_a_flag_of_a_role_needs_one_pool_of_it(tmp_path: Path) -> None:
    flag = Flag("--decode", ("count",), 3, "decode")
    with pytest.raises(ConfigError, match=r"--decode needs a single decode pool, .* has d, e"):
        load_config(write(tmp_path, POOLS), [flag])


def test_tables_of_several_sources_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TLS__FOLDER", "/environment")
    monkeypatch.setenv("BATON_TLS__CLEAR_KV", "true")
    file = write(tmp_path, '[tls]\nfolder = "/file"\nredis_ca = "/ca.pem"\n')
    tls = load_config(file, [Flag("--certs", ("tls", "folder"), "/flag")]).tls
    assert (tls.folder, tls.clear_kv, tls.redis_ca) == ("/flag", True, "/ca.pem")


def test_a_configuration_of_another_process_is_not_changed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_DTYPE", "float32")
    assert load_config().dtype == "float32"
    assert Config().dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "says"),
    [("= 1\n", "is not TOML"), ("a = 1\na = 2\n", "is not TOML"), (None, "no configuration file")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "baton.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(file)
    assert str(file) in caught.value.message


def test_a_line_is_found_in_a_long_file_at_once(tmp_path: Path) -> None:
    tables = "".join(f'[[keys]]\nname = "key-{n}"\n\n' for n in range(2000))
    source = FileSource(write(tmp_path, tables))
    assert source.name_of(("keys", 1500, "name")).endswith(f":{3 * 1500 + 2}")
    assert source.name_of(("keys", 0)).endswith(":1")


def test_a_variable_that_is_nearly_a_field_is_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        *("BATON_MODLE", "BATON_AUTOSCALR__ENABLED", "BATON_HTTP", "BATON_TLS__FOLDER"),
        *("BATON_CACHE_DIR", "BATON_API_KEY", "BATON_PORT_8000_TCP_ADDR", "BATON_SERVICE_HOST"),
    ):
        monkeypatch.setenv(name, "x")
    assert unknown_variables(Config) == [
        "the environment variable BATON_AUTOSCALR__ENABLED is unknown and has no effect; did you"
        " mean BATON_AUTOSCALER__ENABLED?",
        "the environment variable BATON_MODLE is unknown and has no effect; did you mean"
        " BATON_MODEL?",
    ]
