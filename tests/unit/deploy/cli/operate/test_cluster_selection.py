"""Which cluster a command acts on, for any clusters of this and of other users."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.client import chat_command
from deploy.cli.main import app
from deploy.cli.operate.cluster_selection import (
    NoChoice,
    Stranger,
    cluster_of_client,
    cluster_of_grpc,
    select,
    strangers,
    target,
)
from deploy.cli.options.exit_codes import ExitCode
from deploy.processes import cluster_state, run_directory
from deploy.processes.cluster_state import ClusterState
from deploy.processes.process_identity import ProcessIdentity

ONE = ClusterState(
    cluster_id="1f2e3d",
    run_directory="/tmp/baton-a",
    model="tiny",
    http="127.0.0.1:8000",
    grpc="127.0.0.1:8001",
    redis_url="",
    launcher=ProcessIdentity(1, 100, "here"),
    processes={},
)
TWO = replace(
    ONE, cluster_id="aaaa00", http="127.0.0.1:9000", admin_http="127.0.0.1:9100", model="large"
)
BOB = Stranger("bob", Path("/tmp/baton-b"))


def test_the_only_cluster_is_taken_and_named() -> None:
    found = select([ONE])
    assert found.cluster is ONE
    assert str(found) == "cluster 1f2e3d at 127.0.0.1:8000 (model tiny)"


@pytest.mark.parametrize("only_reads", [False, True])
def test_of_several_none_is_taken_and_all_are_listed(only_reads: bool) -> None:
    with pytest.raises(NoChoice) as caught:
        select([ONE, TWO], only_reads=only_reads)
    assert caught.value.code is ExitCode.USAGE
    first, *others = caught.value.lines
    assert "--cluster ID" in first
    for line, cluster in zip(others, (ONE, TWO), strict=True):
        for fact in (cluster.cluster_id, cluster.http, cluster.model, "since 2"):
            assert fact in line


@pytest.mark.parametrize(
    "words", [["chat", "Hi"], ["batch", __file__], ["bench", "serve", "--rate", "1"], ["status"]]
)
def test_commands_take_none_of_several(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "running_clusters", lambda: [ONE, TWO])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "choose one with --cluster ID" in result.output
    result = CliRunner().invoke(app, [*words, "--cluster", "nowhere"])
    assert "'nowhere'; there are:" in result.output


def test_one_of_several_is_named_by_its_id() -> None:
    found = select([ONE, TWO], cluster_id="aaaa00")
    assert found.cluster is TWO
    # Operators' endpoints are where the cluster has them.
    assert found.address == "127.0.0.1:9100"


@pytest.mark.parametrize(("clusters", "says"), [([], "none of your"), ([ONE], "'x'; there are")])
def test_an_id_that_is_not_here(clusters: list[ClusterState], says: str) -> None:
    with pytest.raises(NoChoice) as caught:
        select(clusters, cluster_id="x")
    assert caught.value.code is ExitCode.FAILED
    assert says in caught.value.lines[0]


@pytest.mark.parametrize(
    ("http", "cluster", "asked"),
    [
        # The operators' endpoints of TWO are not where its API is.
        ("127.0.0.1:9000", TWO, "127.0.0.1:9100"),
        ("https://127.0.0.1:9000/", TWO, "https://127.0.0.1:9100"),
        ("localhost:9000", TWO, "127.0.0.1:9100"),
        ("127.0.0.1:9100", TWO, "127.0.0.1:9100"),
        ("127.0.0.1:8000", ONE, "127.0.0.1:8000"),
        ("localhost:8000", ONE, "localhost:8000"),
        ("LOCALHOST:8000", ONE, "LOCALHOST:8000"),
        ("http://localhost:8000/", ONE, "http://localhost:8000/"),
        ("[::1]:8000", None, "[::1]:8000"),
        ("localhost:8001", None, "localhost:8001"),
        ("elsewhere:8000", None, "elsewhere:8000"),
        ("elsewhere:port", None, "elsewhere:port"),
        ("[::1", None, "[::1"),
    ],
)
def test_an_address_names_a_cluster_here_or_elsewhere(
    http: str, cluster: ClusterState | None, asked: str
) -> None:
    found = select([ONE, TWO], http=http)
    assert found.cluster is cluster
    assert found.http == asked
    assert found.address == asked.rpartition("//")[2].removesuffix("/")
    if cluster is None:
        assert str(found) == f"the cluster at {asked}"


def test_localhost_names_what_listens_on_either_loopback_address() -> None:
    six = replace(ONE, http="[::1]:8000")
    assert select([six], http="localhost:8000").cluster is six
    assert select([replace(ONE, http="localhost:8000")], http="127.0.0.1:8000").cluster is not None


def test_a_grpc_address_names_a_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_state, "running_clusters", lambda: [ONE])
    assert cluster_of_grpc("localhost:8001", None) is ONE
    assert cluster_of_grpc("localhost:8000", None) is None


def test_without_a_cluster_clients_name_their_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "none of your clusters runs on this machine: using {}\n"
    monkeypatch.setattr(cluster_state, "running_clusters", list)
    assert cluster_of_client(None) is None
    assert capsys.readouterr().err == told.format("127.0.0.1:8000")
    assert target(None, None, only_reads=True).cluster is None
    assert capsys.readouterr().err == told.format("127.0.0.1:8000")
    monkeypatch.setattr(chat_command, "DEFAULT_GRPC", "127.0.0.1:1")
    assert told.format("127.0.0.1:1") in CliRunner().invoke(app, ["chat", "Hi"]).stderr
    # An address that the user has given is no news.
    assert cluster_of_client(None, "127.0.0.1:1") is None
    assert capsys.readouterr().err == ""


def test_without_a_cluster_a_batch_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts and the key would go to whatever listens at the default address."""
    monkeypatch.setattr(cluster_state, "running_clusters", list)
    result = CliRunner().invoke(app, ["batch", __file__])
    assert result.exit_code == ExitCode.FAILED
    assert "none of your clusters runs on this machine: give --http" in result.stderr


def test_an_address_and_an_id_contradict_each_other() -> None:
    with pytest.raises(NoChoice) as caught:
        select([ONE], http=ONE.http, cluster_id=ONE.cluster_id)
    assert caught.value.code is ExitCode.USAGE


def test_without_a_cluster_nothing_is_changed_at_the_default_address() -> None:
    with pytest.raises(NoChoice) as caught:
        select([])
    assert caught.value.code is ExitCode.FAILED
    assert "--http" in caught.value.lines[0]
    assert len(caught.value.lines) == 1
    # To read is safe; the caller says which address it asks.
    found = select([], only_reads=True)
    assert (found.cluster, found.http, found.address) == (None, None, "127.0.0.1:8000")


def test_a_cluster_of_another_user_is_reported_and_not_used() -> None:
    with pytest.raises(NoChoice) as caught:
        select([], [BOB])
    text = " ".join(caught.value.lines)
    assert "another user (bob)" in text
    assert "/tmp/baton-b" in text
    assert "--api-key" in text
    assert select([ONE], [BOB]).cluster is ONE


def test_another_users_folder_controls_no_terminal() -> None:
    folder = "/tmp/baton-\x1b[2J\n\u202e"
    with pytest.raises(NoChoice) as caught:
        select([], [Stranger("bob", Path(folder))])
    assert all(line.isprintable() for line in caught.value.lines)
    assert "baton-\\x1b[2J" in caught.value.lines[1]


def test_run_directories_of_other_users_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "parent_directory", lambda: tmp_path)
    mine = tmp_path / "baton-mine"
    mine.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "baton-file").touch()
    assert strangers() == []
    (found,) = strangers(own=os.getuid() + 1)
    assert found.directory == mine
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to another user")
    os.chown(mine, 12345, 12345)
    assert strangers() == [Stranger("uid 12345", mine)]
