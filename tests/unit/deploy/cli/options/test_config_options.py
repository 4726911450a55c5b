"""Options made from the configuration's fields: all of them, with types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main
from typer.testing import CliRunner

from baton.config.cluster import Config
from baton.config.fields import REMOVED, RENAMED
from baton.config.pools import PoolConfig
from deploy.cli.main import app
from deploy.cli.options.config_options import (
    PANELS,
    ConfigOption,
    config_options,
    old_options,
    option_flag,
    option_type,
)
from deploy.cli.serve_command import configuration
from tests.support.deploy.baton_commands import parse

TABLES = {"tls", "autoscaler", "prices", "advanced"}
LISTS = {
    "pools": "--pool",
    "classes": "--context-class",
    "tenants": "--tenant",
    "class_prices": "--class-price",
}
SHOWN = [option for option in config_options() if option.panel]
VALUES = [option for option in SHOWN if not option.is_entry]
OTHERS = {
    "data_network": {"--transport": "gloo"},
    # Options that a value requires.
    "ray_address": {"--redis-url": "redis://127.0.0.1:1"},
    "leave_workers": {
        "--ray-address": "auto",
        "--redis-url": "redis://127.0.0.1:1",
        "--cluster-id": "one",
    },
    "advanced_lease_s": {"--advanced-heartbeat-s": "0.5"},
    "drafter": {"--draft-model": "small"},
    "draft_revision": {"--draft-model": "small"},
    "tls_certificate": {"--tls-key": "/key.pem"},
    "tls_key": {"--tls-certificate": "/certificate.pem"},
    "client_ca": {"--certs": "/certs"},
    "chunk_tokens": {"--max-sequences": "1"},
}

PLAIN = {
    "batch_store": "local",
    "data_network": "127.0.0.0/8",
    "otlp_endpoint": "http://127.0.0.1:9",
    "batch_hours": "22:00-06:00",
    "batch_time_zone": "Europe/Berlin",
}
SMALLEST = {"max_model_len": 32}
"""Where 2 is too small."""


def arguments_for(option: ConfigOption) -> tuple[list[str], Any]:
    """The option with a value that is not its default, and the value."""
    kind, default = option_type(option.field), option.field.default
    if kind is bool:
        flag = f"--no-{option.flags[0][2:]}" if default else option.flags[0]
        return [flag], not default
    value: Any
    if get_origin(kind) is Literal:
        value = next(one for one in reversed(get_args(kind)) if one != default)
    elif kind is int:
        value = (default or 0) + SMALLEST.get(option.name, 2)
    elif kind is float:
        value = round((default or 1.0) / 2, 3)
    elif "HOST:PORT" in str(option.parameter().annotation.__metadata__[0].metavar):
        value = "127.0.0.1:9"
    elif option.name in PLAIN:
        value = PLAIN[option.name]
    else:
        value = "/some/where"
    if kind == list[str]:
        value = "https://a.example"
        return [option.flags[0], value, option.flags[0], "*"], (value, "*")
    return [option.flags[0], str(value)], value


def test_every_field_has_an_option_except_secrets() -> None:
    having = {option.path: option.flags[0] for option in config_options() if not option.pools}
    for name, field in Config.model_fields.items():
        if name in TABLES:
            table: Any = field.annotation
            assert {(name, inner) for inner in table.model_fields} <= set(having), name
        else:
            assert ((name,) in having) is (name not in ("keys", "cluster_secret")), name
    assert {name: having[(name,)] for name in LISTS} == LISTS


@pytest.mark.parametrize("option", VALUES, ids=lambda option: option.name)
def test_a_value_reaches_the_configuration(option: ConfigOption) -> None:
    words, value = arguments_for(option)
    beside = [word for pair in OTHERS.get(option.name, {}).items() for word in pair]
    config = configuration(parse(["serve", *words, *beside]).parameters)
    if option.pools:
        pools = [pool for pool in config.pools if option.pools in ("all", pool.role)]
        assert pools
        for pool in pools:
            assert getattr(pool, option.path[0]) == value
        others = [pool for pool in config.pools if pool not in pools]
        for pool in others:
            assert getattr(pool, option.path[0]) == option.field.default
        return
    found: Any = config
    for part in option.path:
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("option", SHOWN, ids=lambda option: option.name)
def test_help_is_a_whole_sentence_with_the_default(option: ConfigOption) -> None:
    text = option.parameter().annotation.__metadata__[0].help
    assert text.endswith(".")
    assert "``" not in text
    assert len(text) < 260, text
    assert text[0].isupper()
    default = option.field.default
    if not option.is_entry and default not in ("", (), None) and not isinstance(default, bool):
        assert (
            f"Default: {default:g}." in text if isinstance(default, float) else str(default) in text
        )


def test_panels_are_all_used_and_all_options_have_one() -> None:
    assert {option.panel for option in SHOWN} == set(PANELS)
    panel_of = {option.name: option.panel for option in SHOWN}
    assert panel_of["kv_dtype"] == panel_of["kv_pool_mib"] == "KV cache"
    assert panel_of["tool_parser"] == panel_of["dtype"] == "Model"
    assert panel_of["keys_file"] == panel_of["certs"] == "Security"
    assert panel_of["cluster_id"] == panel_of["redis_url"] == "Cluster"
    assert panel_of["autoscaler"] == panel_of["autoscaler_min_prefill"] == "Autoscaling"
    assert panel_of["advanced_lease_s"] == "Advanced"


@pytest.mark.parametrize("option", SHOWN, ids=lambda option: option.name)
def test_what_is_no_choice_or_no_number_is_a_usage_error(option: ConfigOption) -> None:
    if option.is_entry or option_type(option.field) in (str, bool, list[str]):
        return
    result = CliRunner().invoke(app, ["serve", option.flags[0], "~"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert option.flags[0] in result.output
    assert "must be" in result.output
    assert "Input should" not in result.output
    assert "Value error" not in result.output


def test_bounds_are_a_usage_error() -> None:
    for words in (
        ["--prefill", "-1"],
        ["--routers", "65"],
        ["--trace-ratio", "1.5"],
        ["--autoscaler-max-decode", "1025"],
        ["--advanced-index-mib", "0"],
    ):
        result = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "300"})
        assert result.exit_code == 2, words
        assert "must be at" in result.output


def test_choices_are_completed() -> None:
    command: Any = typer.main.get_command(app)
    serve = command.commands["serve"]
    context = serve.make_context("serve", [])
    (policy,) = (one for one in serve.get_params(context) if one.name == "policy")
    found = [item.value for item in policy.shell_complete(context, "p")]
    assert found == ["predictive", "prefix", "power_of_two"]


def test_fields_of_pools_have_the_bounds_of_the_pool() -> None:
    (prefill,) = (one for one in SHOWN if one.name == "prefill")
    assert prefill.field is PoolConfig.model_fields["count"]
    option = prefill.parameter().annotation.__metadata__[0]
    assert (option.min, option.max) == (0, 1024)


def test_a_role_is_in_the_name_of_an_option_or_it_is_of_all_pools() -> None:
    for option in SHOWN:
        role = option.name.partition("_")[0]
        if option.pools:
            assert option.pools == (role if role in ("prefill", "decode") else "all"), option.name


def test_pools_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[[pools]]\nname = "old"\nrole = "prefill"\n')
    words = ["--pool", "name=long, role=prefill, kv-pool-mib=64, peak_gflops=2.5, peak_gb_per_s=1"]
    words += ["--pool", '{"name": "d", "role": "decode", "count": 2, "resources": {"x": 1}}']
    words += ["--config", str(file), "--max-sequences", "8", "--decode", "3"]
    pools = configuration(parse(["serve", *words]).parameters).pools
    assert [(one.name, one.role, one.count, one.max_sequences) for one in pools] == [
        ("long", "prefill", 1, 8),
        ("d", "decode", 3, 8),
    ]
    assert (pools[0].kv_pool_mib, pools[0].peak_gflops) == (64, 2.5)
    assert pools[1].resources == {"x": 1.0}


def test_classes_and_tenants_of_the_command_line() -> None:
    words = ["--context-class", "name=short,max_tokens=9,slo_ttft_s=0.5"]
    words += ["--context-class", "name=rest", "--tenant", "name=team,weight=2.5"]
    config = configuration(parse(["serve", *words]).parameters)
    assert [(one.name, one.max_tokens, one.slo_ttft_s) for one in config.classes] == [
        ("short", 9, 0.5),
        ("rest", None, None),
    ]
    assert config.tenant_weights == {"default": 1.0, "team": 2.5}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["--pool", "prefill"],
            2,
            "--pool: expected FIELD=VALUE,… or a JSON object, not `prefill`",
        ),
        (["--pool", "{name"], 2, "--pool: not a JSON object"),
        (["--pool", "name=a,name=b"], 2, "--pool: `name` is given twice"),
        (["--pool", "name=p,role=prefil"], 1, "pool `p` (--pool): `role` must be prefill or"),
        (["--pool", "name=p,role=prefill,cout=2"], 1, "unknown field `cout`; did you mean `count`"),
        (["--pool", "role=prefill"], 1, "--pool: `pools[0].name` is missing"),
        (["--tenant", "name=t,weight=x"], 1, "tenant `t` (--tenant): `weight` must be a number"),
    ],
)
def test_faults_of_entries_name_the_option(words: list[str], code: int, says: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    assert says in result.output


def test_an_old_option_is_not_suggested(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app).main(["serve", "--autoscaler-leas-prefill", "1"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "No such option: --autoscaler-leas-prefill" in said
    assert "--autoscaler-max-prefill" in said
    assert "--autoscaler-least-prefill" not in said


@pytest.mark.parametrize("old", [*RENAMED, *REMOVED], ids=".".join)
def test_an_old_option_is_refused_with_the_new_one(old: tuple[str, ...]) -> None:
    name = old[-1] if old[0] == "tls" else "_".join(old)
    flag = f"--{name.replace('_', '-')}"
    words = [flag] if old == ("standby",) else [flag, "1"]
    result = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    new = f"it is now {option_flag(RENAMED[old])}" if old in RENAMED else "it was removed: "
    assert f"'{flag}': {new}" in result.output


def test_old_options_are_no_options() -> None:
    flags = {flag for option in config_options() for flag in option.flags}
    assert flags.isdisjoint(flag for old in old_options() for flag in old.flags)
