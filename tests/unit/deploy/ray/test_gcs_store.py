"""How Ray's control store learns of the store behind it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from baton.errors import ConfigError
from deploy.processes.run_directory import RunDirectory
from deploy.ray.gcs_store import GcsStore, check_gcs_store


def test_the_password_is_in_a_file_of_the_owners_and_on_no_command_line(tmp_path: Path) -> None:
    store = GcsStore("rediss://someone:s3%40c'ret@store:7000/0", "c1")
    assert store.flags() == [
        "--redis_address=store",
        "--redis_port=7000",
        "--redis_enable_ssl=true",
        "--redis_username=someone",
        "--fromenv=redis_password",
    ]
    shows = tmp_path / "shows"
    shows.write_text('#!/bin/sh\necho "$FLAGS_redis_password" "$@"\n')
    shows.chmod(0o700)
    program = store.write_program(str(shows), RunDirectory(tmp_path))
    assert program.stat().st_mode & 0o777 == 0o700
    done = subprocess.run(
        [program, "--session-name=a b"], capture_output=True, text=True, check=True, timeout=10
    )
    assert done.stdout.strip() == f"s3@c'ret {' '.join(store.flags())} --session-name=a b"


def test_a_server_without_a_password_is_asked_without_one(tmp_path: Path) -> None:
    store = GcsStore("redis://127.0.0.1:7000", "c1")
    assert store.flags()[0] == "--redis_address=127.0.0.1"
    program = store.write_program("/bin/true", RunDirectory(tmp_path))
    assert "password" not in program.read_text()


def test_rays_processes_wait_for_their_control_store_and_keep_its_tables_apart() -> None:
    environment = GcsStore("redis://:secret@127.0.0.1:7000", "c1").environment()
    assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 24 * 3600
    assert environment["RAY_external_storage_namespace"] == "c1"
    assert "secret" not in str(environment)


@pytest.mark.parametrize("good", ["", "embedded", "redis://h:1", "rediss://:p@h:1/0"])
def test_what_does_as_a_store(good: str) -> None:
    check_gcs_store(good, "redis://other:1/0")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("http://h:1", "redis://host:port"),
        ("h:1", "redis://host:port"),
        ("redis://h:1/2", "database 0"),
        ("redis://other:1", "a different server"),
        ("redis://:secret@other:1", "a different server"),
    ],
)
def test_what_does_not(bad: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_gcs_store(bad, "redis://other:1/3")
    assert "secret" not in caught.value.message
