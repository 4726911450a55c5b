"""How servers are started, and that nothing of them is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError, Unavailable
from loadtest.common import peer_servers
from loadtest.common.peer_servers import PEERS, find_program, make_server, program_version, serving
from tests.support.deploy.baton_commands import parse
from tests.support.loadtest.fake_programs import make_fakes


def test_every_peer_can_be_made(tmp_path: Path) -> None:
    programs = make_fakes(tmp_path).programs
    servers = [make_server(name, programs) for name in PEERS]
    assert len({server.port for server in servers}) == len(servers)
    assert [server.title for server in servers if server.ours] == ["Baton, bf16", "Baton, int8"]
    assert {s.name for s in servers if s.precision == "int8"} == {"baton-int8", "llamacpp-q8"}
    assert all(any(str(s.port) in word for word in s.command) for s in servers)


def test_baton_is_started_as_a_user_would(tmp_path: Path) -> None:
    programs = replace(make_fakes(tmp_path).programs, baton_arguments="--decode 2")
    command = make_server("baton", programs).command
    assert command[1:4] == ("serve", "--model", str(tmp_path))
    assert command[-2:] == ("--decode", "2")
    assert "--quantization" not in command
    quantized = make_server("baton-int8", programs).command
    assert quantized[quantized.index("--quantization") + 1] == "int8"


def test_no_server_speculates_unless_configured(tmp_path: Path) -> None:
    """A small model repeats itself behind random prompts: a comparison would show that alone."""
    programs = make_fakes(tmp_path).programs
    for name in PEERS:
        server = make_server(name, programs)
        if server.ours:
            assert parse(server.command[1:]).parameters["drafter"] == "none"
        else:
            assert not any("spec" in word or "draft" in word for word in server.command[3:])
    told = replace(programs, baton_arguments="--drafter ngram")
    assert parse(make_server("baton", told).command[1:]).parameters["drafter"] == "ngram"


@pytest.mark.parametrize(
    ("usable", "everything", "one"), [([0, 1], "0-1", "1"), ([0, 2], "0,2", "2"), ([3], "3", "3")]
)
def test_vllm_is_bound_to_the_cores_that_there_are(
    usable: list[int], everything: str, one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_servers, "cores", lambda: usable)
    programs = make_fakes(tmp_path).programs
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    assert make_server("vllm", programs).environment[bound] == everything
    assert make_server("vllm-one-core", programs).environment[bound] == one


def test_what_is_missing_is_named_with_its_option(tmp_path: Path) -> None:
    programs = make_fakes(tmp_path).programs
    for name, without, option in (
        ("vllm", replace(programs, vllm=None), "--vllm-bin"),
        ("llamacpp", replace(programs, llama_server=None), "--llama-server"),
        ("llamacpp", replace(programs, gguf=None), "--gguf"),
        ("llamacpp-q8", replace(programs, gguf_q8=None), "--gguf-q8"),
        ("llamacpp", replace(programs, gguf=tmp_path / "absent"), "is not a file"),
        ("baton", replace(programs, baton=tmp_path / "absent"), "make install"),
    ):
        with pytest.raises(ConfigError, match=option):
            make_server(name, without)
    with pytest.raises(ConfigError, match="known: baton"):
        make_server("nobody", programs)


def test_a_program_is_looked_for_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fakes(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program(None, "vllm") == tmp_path / "vllm"
    assert find_program(None, "absent") is None
    assert find_program(tmp_path / "llama-server", "x") == tmp_path / "llama-server"
    with pytest.raises(ConfigError, match="check the path"):
        find_program(tmp_path / "bf16.gguf", "llama-server")


def test_versions(tmp_path: Path) -> None:
    programs = make_fakes(tmp_path).programs
    assert program_version(programs.vllm) == "1.2 of vllm"
    assert program_version(None) == ""
    assert program_version(tmp_path / "absent") == ""


def test_serving_waits_for_health_and_ends_the_whole_group(tmp_path: Path) -> None:
    fakes = make_fakes(tmp_path)
    server = make_server("vllm", fakes.programs)
    with serving(server, tmp_path / "log") as seconds:
        assert seconds > 0
        assert len(fakes.left()) == 2
    assert fakes.left() == []


def test_a_server_that_ends_early_says_why(tmp_path: Path) -> None:
    fakes = make_fakes(tmp_path)
    fakes.set_mode("server", "dies")
    server = make_server("llamacpp", fakes.programs)
    with (
        pytest.raises(Unavailable, match=r"(?s)exit code 1.*no weights for a fake") as caught,
        serving(server, tmp_path / "log"),
    ):
        pytest.fail("it was never ready")
    assert "llama.cpp, bf16" in caught.value.message
    assert fakes.left() == []


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    fakes = make_fakes(tmp_path)
    server = make_server("baton", fakes.programs)
    with (
        pytest.raises(Unavailable, match="not ready in time"),
        serving(server, tmp_path / "log", ready_s=0.0),
    ):
        pytest.fail("it had no time")
    if (tmp_path / "pids").exists():
        assert fakes.left() == []


def test_threads_of_this_shell_are_not_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "vllm"
    script.write_text(
        '#!/bin/sh\necho "threads=$OMP_NUM_THREADS offline=$HF_HUB_OFFLINE"\nexit 4\n'
    )
    script.chmod(0o755)
    programs = replace(make_fakes(tmp_path / "others").programs, vllm=script)
    with (
        pytest.raises(Unavailable, match="threads= offline=1"),
        serving(make_server("vllm", programs), tmp_path / "log"),
    ):
        pytest.fail("it was never ready")
