"""Options made from the configuration's fields: all of them, with types, bounds and help."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main
from typer.testing import CliRunner

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.tls import TlsConfig
from deploy.cli.main import app
from deploy.cli.options.config_options import PANELS, ConfigOption, config_options, option_type
from deploy.cli.serve_command import configuration
from tests.support.deploy.baton_commands import parse

TABLES = {"tls", "pools", "classes", "tenants", "keys", "autoscaler", "advanced"}
SHOWN = [option for option in config_options() if option.panel]
OTHERS = {
    # What a value needs beside it.
    "ray_address": {"--redis-url": "redis://127.0.0.1:1"},
    "leave_workers": {
        "--ray-address": "auto",
        "--redis-url": "redis://127.0.0.1:1",
        "--cluster-id": "one",
    },
    "drafter": {"--draft-model": "small"},
    "draft_revision": {"--draft-model": "small"},
    "tls_certificate": {"--tls-key": "/key.pem"},
    "tls_key": {"--tls-certificate": "/certificate.pem"},
    "client_ca": {"--certs": "/certs"},
    "chunk_tokens": {"--max-sequences": "1"},
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
        value = round(default / 2, 3)
    elif "HOST:PORT" in str(option.parameter().annotation.__metadata__[0].metavar):
        value = "127.0.0.1:9"
    elif option.name == "otlp_endpoint":
        value = "http://127.0.0.1:9"
    else:
        value = "/some/where"
    if kind == list[str]:
        value = "https://a.example"
        return [option.flags[0], value, option.flags[0], "*"], (value, "*")
    return [option.flags[0], str(value)], value


def test_every_scalar_field_of_the_cluster_has_an_option() -> None:
    having = {option.path for option in config_options() if not option.pools}
    for name in Config.model_fields:
        assert ((name,) in having) is (name not in TABLES), name
    assert {("tls", name) for name in TlsConfig.model_fields} <= having


@pytest.mark.parametrize("option", SHOWN, ids=lambda option: option.name)
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
    if default not in ("", (), None) and not isinstance(default, bool):
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


@pytest.mark.parametrize("option", SHOWN, ids=lambda option: option.name)
def test_what_is_no_choice_or_no_number_is_a_usage_error(option: ConfigOption) -> None:
    if option_type(option.field) in (str, bool, list[str]):
        return
    result = CliRunner().invoke(app, ["serve", option.flags[0], "~"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert option.flags[0] in result.output
    assert "must be" in result.output
    assert "Input should" not in result.output
    assert "Value error" not in result.output


def test_bounds_are_a_usage_error() -> None:
    for words in (["--prefill", "0"], ["--routers", "65"], ["--trace-ratio", "1.5"]):
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
    assert (option.min, option.max) == (1, 1024)


def test_a_role_is_in_the_name_of_an_option_or_it_is_of_all_pools() -> None:
    for option in SHOWN:
        role = option.name.partition("_")[0]
        if option.pools:
            assert option.pools == (role if role in ("prefill", "decode") else "all"), option.name
