"""What users of vLLM type does what it says, or is refused with what to do instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from deploy.cli.options.config_options import config_options
from deploy.cli.options.vllm_aliases import ACCEPTED, REFUSED, RENAMED, WORDS, Accepted, Refused
from deploy.cli.serve_command import configuration
from tests.support.deploy.baton_commands import parse


def said(*words: str, code: int) -> str:
    # No configuration file is there: nothing starts, whatever the other options are.
    arguments = ["serve", "--config", "/nonexistent/baton.toml", *words]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--kv-cache-dtype", "int8"], "kv_dtype", "int8"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_dtype", "fp8"),
        (["--tool-call-parser", "hermes"], "tool_parser", "hermes"),
        (["--tool-call-parser", "llama3_json"], "tool_parser", "llama3"),
        (["--tool-call-parser", "openai"], "tool_parser", "harmony"),
        (["--tool-call-parser", "qwen3_coder"], "tool_parser", "qwen3_coder"),
        (["--reasoning-parser", "openai_gptoss"], "reasoning_parser", "harmony"),
        (["--reasoning-parser", "deepseek_r1"], "reasoning_parser", "think"),
        (["--reasoning-parser", "qwen3"], "reasoning_parser", "think"),
        (["--quantization", "awq"], "quantization", "auto"),
        (["-q", "gptq_marlin"], "quantization", "auto"),
        (["--quantization", "fp8"], "quantization", "fp8"),
        (["--dtype", "auto"], "dtype", "bfloat16"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--served-model-name", "m"], "served_model_name", "m"),
        (["--generation-config", "vllm"], "generation_config", "none"),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--disable-log-requests"], "log_requests", False),
        (["--no-enable-log-requests"], "log_requests", False),
        (["--enable-log-requests"], "log_requests", True),
    ],
)
def test_an_option_of_the_cluster(
    words: list[str], field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if field == "log_requests":
        monkeypatch.setenv("BATON_LOG_REQUESTS", str(not value))
    assert getattr(configuration(parse(["serve", *words]).parameters), field) == value


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--tensor-parallel-size", "2"], "tp", 2),
        (["-tp", "2"], "tp", 2),
        (["--max-num-seqs", "7"], "max_sequences", 7),
        (["--max-num-batched-tokens=300"], "chunk_tokens", 300),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_fraction", 0.5),
    ],
)
def test_an_option_of_all_pools(words: list[str], field: str, value: Any) -> None:
    config = configuration(parse(["serve", *words]).parameters)
    assert [getattr(pool, field) for pool in config.pools] == [value, value]


def test_the_certificate_has_vllm_s_names() -> None:
    words = ["serve", "--ssl-certfile", "/c.pem", "--ssl-keyfile", "/k.pem"]
    tls = configuration(parse(words).parameters).tls
    assert (tls.certificate, tls.key) == ("/c.pem", "/k.pem")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv-cache-dtype", "fp8_e5m2"], "must be auto, int8 or fp8, not `fp8_e5m2`"),
        (["--tool-call-parser", "jamba"], "must be auto, deepseek_v3, deepseek_v31, gemma, glm45"),
        (["--quantization", "bitsandbytes"], "must be auto, none, int8, int4 or fp8"),
    ],
)
def test_a_choice_that_baton_has_not_names_those_that_it_has(words: list[str], says: str) -> None:
    output = said(*words, code=2)
    assert f"'{words[0]}'" in output
    assert says in output


@pytest.mark.parametrize("alias", ACCEPTED, ids=lambda alias: alias.flags[0])
def test_what_changes_nothing_is_noted(alias: Accepted) -> None:
    for flag in alias.flags:
        output = said(flag, code=1)
        assert f"note: {alias.flags[0]} has no effect: {alias.note}" in output
        assert "no configuration file" in output, "it was refused"


@pytest.mark.parametrize("alias", REFUSED, ids=lambda alias: alias.flags[0])
def test_what_baton_has_not_is_refused_with_the_reason(alias: Refused) -> None:
    for flag in alias.flags:
        words = [flag, "7"] if alias.takes_value else [flag]
        assert alias.reason in said(*words, code=2)
        if alias.harmless:
            assert "no configuration file" in said(flag, alias.harmless, code=1)


def test_a_word_of_vllm_s_is_noted() -> None:
    assert "note: --dtype half: Baton uses float16" in said("--dtype", "half", code=1)


def test_no_flag_stands_for_two_things() -> None:
    flags = [flag for alias in (*RENAMED, *ACCEPTED, *REFUSED) for flag in alias.flags]
    assert len(set(flags)) == len(flags)
    assert set(WORDS) == {
        "generation_config",
        "dtype",
        "quantization",
        "kv_dtype",
        "tool_parser",
        "reasoning_parser",
    }


PAGE = (Path(__file__).parents[5] / "docs/how-to/migrate-from-vllm.md").read_text()


def test_the_page_has_every_name_and_every_word() -> None:
    for alias in (*RENAMED, *ACCEPTED, *REFUSED):
        for flag in alias.flags:
            assert re.search(f"`{flag}[` ]", PAGE), flag
    for words in WORDS.values():
        for vllm, own in words.items():
            assert re.search(f"`{vllm}`.*becomes? `{own}`", PAGE), vllm


def test_the_page_s_options_and_metrics_exist() -> None:
    known = {flag for option in config_options() for flag in option.flags}
    theirs = {flag for alias in (*ACCEPTED, *REFUSED) for flag in alias.flags}
    others = {"--host", "--port", "--api-key-file", "--help", "--scope", "--no-log-requests"}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE):
        assert flag in known | theirs | others, flag
    metrics = (Path(__file__).parents[5] / "docs/reference/metrics.md").read_text()
    for name in re.findall(r"\bbaton_[a-z_]+", PAGE):
        assert f"`{name}`" in metrics, name
