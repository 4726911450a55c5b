"""`baton drain`, `role`, `scale` and `leave`, against real endpoints of a scripted cluster."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from deploy.cli.operate import worker_commands
from deploy.cli.options.exit_codes import ExitCode
from deploy.processes import process_identity
from tests.support.deploy.machine import DEADLINE_S, Machine, machine
from tests.support.router.admin_worker_api import Fronts, fronts

NAMED = "cluster 1f2e3d at {http} (model tiny)"
NO_ROOT = "only root can give a run directory to another user"
SLEEPER = "import time; print(flush=True); time.sleep(600)"
SIGNER = """
import sys, time
from pathlib import Path
from deploy.workers.node import NodeWorkers
NodeWorkers(Path(sys.argv[1])).register(sys.argv[2], 5.0, cluster="1f2e3d")
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    # First, since it follows the system's temporary directory, too.
    tmp_path_factory.getbasetemp()
    with machine() as made:
        yield made


@asynccontextmanager
async def cluster(here: Machine, cluster_id: str = "1f2e3d") -> AsyncIterator[tuple[Fronts, str]]:
    """The one that runs here, and its address."""
    async with fronts() as there:
        http = there.http.base_url.netloc.decode()
        here.add(cluster_id, http, {"router": 1, "decode-0": 2})
        yield there, http


async def run(here: Machine, *arguments: str) -> Result:
    return await asyncio.to_thread(here.run, *arguments)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with child(SLEEPER) as one:
        yield one


class child:  # noqa: N801 - a context manager
    """A process that runs ``code``, once it has printed a line."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._command = [sys.executable, "-c", code, *arguments]

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self._process

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()


MUTATING = [
    ("drain", "decode-0", "--force"),
    ("role", "decode-0", "prefill", "--force"),
    ("scale", "decode", "3"),
]


@pytest.mark.parametrize("command", MUTATING, ids=lambda words: words[0])
def test_without_a_cluster_nothing_is_asked(here: Machine, command: tuple[str, ...]) -> None:
    result = here.run(*command, "--yes")
    assert result.exit_code == ExitCode.FAILED
    assert "none of your clusters runs on this machine: give --http" in result.stderr
    assert "another user" not in result.stderr


@pytest.mark.parametrize("command", MUTATING, ids=lambda words: words[0])
async def test_a_command_needs_yes_where_there_is_no_terminal(
    here: Machine, command: tuple[str, ...]
) -> None:
    async with cluster(here) as (there, http):
        refused = await run(here, *command)
        assert refused.exit_code == ExitCode.REFUSED
        assert NAMED.format(http=http) in refused.stderr
        assert "give --yes" in refused.stderr
        assert (there.control.told, there.sizes.sizes) == ([], {})
        done = await run(here, *command, "--yes")
        assert done.exit_code == 0, done.output
        assert NAMED.format(http=http) in done.stdout
        assert there.control.told or there.sizes.sizes == {"decode": 3}


@pytest.mark.parametrize("command", MUTATING, ids=lambda words: words[0])
async def test_a_dry_run_says_what_would_happen(here: Machine, command: tuple[str, ...]) -> None:
    async with cluster(here) as (there, http):
        words = [word for word in command if word != "--force"]
        result = await run(here, *words, "--dry-run")
        assert result.exit_code == 0, result.output
        assert NAMED.format(http=http) in result.stdout
        assert "dry run: nothing was changed" in result.stdout
        if command[0] == "scale":
            assert "it starts decode-1, decode-2" in result.stdout
        else:
            assert "3 running and 1 waiting requests" in result.stdout
            assert "the last ready decode worker" in result.stderr
            assert "needs --force" in result.stderr
        assert (there.control.told, there.sizes.sizes) == ([], {})


async def test_a_dry_run_of_a_smaller_pool_names_who_leaves(here: Machine) -> None:
    async with cluster(here) as (there, _):
        there.sizes.sizes = {"decode": 2}
        result = await run(here, "scale", "decode", "1", "--dry-run")
        assert "it drains decode-1, where 0 requests end" in result.stdout
        result = await run(here, "scale", "decode", "2")
        assert result.exit_code == 0
        assert "already has 2 workers" in result.stdout


@pytest.mark.parametrize("command", MUTATING[:2], ids=lambda words: words[0])
async def test_the_last_worker_of_a_role_is_kept_without_force(
    here: Machine, command: tuple[str, ...]
) -> None:
    async with cluster(here) as (there, http):
        words = [word for word in command if word != "--force"]
        refused = await run(here, *words, "--yes")
        assert refused.exit_code == ExitCode.REFUSED
        expected = f"decode-0 is the last ready decode worker of {NAMED.format(http=http)}"
        assert expected in refused.stderr
        assert "give --force" in refused.stderr
        assert there.control.told == []


async def test_the_router_has_the_last_word(here: Machine) -> None:
    """It may have lost the other worker since it was asked."""
    async with cluster(here) as (there, _):
        refused = await run(here, "drain", "prefill-0", "--yes")
        assert refused.exit_code == ExitCode.REFUSED
        assert "prefill-0 is the last ready prefill worker" in refused.stderr
        assert there.control.told == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("drain", "decode-9"), "has no worker 'decode-9'; its workers: decode-0, prefill-0"),
        (("role", "decode-9", "prefill"), "has no worker 'decode-9'"),
        (("scale", "encode", "1"), "has no pool 'encode'; its pools: decode, prefill"),
        (("drain", "router-7"), "has no router-7 on this machine; there are: router"),
    ],
)
async def test_what_the_cluster_does_not_have(
    here: Machine, command: tuple[str, ...], says: str
) -> None:
    async with cluster(here) as (_, http):
        result = await run(here, *command, "--yes")
        assert result.exit_code == ExitCode.FAILED
        assert NAMED.format(http=http) in result.stderr
        assert says in result.stderr


@pytest.mark.parametrize("command", MUTATING, ids=lambda words: words[0])
async def test_of_two_clusters_one_must_be_named(here: Machine, command: tuple[str, ...]) -> None:
    async with cluster(here) as (there, http):
        here.add("bbbbbb", "127.0.0.1:1")
        refused = await run(here, *command, "--yes")
        assert refused.exit_code == ExitCode.USAGE
        assert "choose one with --cluster ID" in refused.stderr
        for fact in ("1f2e3d", http, "bbbbbb", "127.0.0.1:1"):
            assert fact in refused.stderr
        assert (there.control.told, there.sizes.sizes) == ([], {})
        for choice in (("--cluster", "1f2e3d"), ("--http", http)):
            done = await run(here, *command, "--dry-run", *choice)
            assert done.exit_code == 0, done.output
            assert NAMED.format(http=http) in done.stdout


async def test_a_cluster_of_another_user_is_not_taken(here: Machine) -> None:
    if os.getuid() != 0:
        pytest.skip(NO_ROOT)
    async with fronts() as there:
        http = there.http.base_url.netloc.decode()
        here.give_away(here.add("cccccc", http))
        result = await run(here, "drain", "decode-0", "--yes", "--force")
        assert result.exit_code == ExitCode.FAILED
        assert "another user (uid 12345)" in result.stderr
        assert "--api-key" in result.stderr
        assert there.control.told == []
        # Its address may be given; then the router names it.
        done = await run(here, "drain", "decode-0", "--yes", "--force", "--http", http)
        assert done.exit_code == 0, done.output
        assert NAMED.format(http=http) in done.stdout
        assert there.control.told


async def test_a_router_of_another_cluster_is_left_alone(here: Machine) -> None:
    """A port may have been taken over since the state was written."""
    async with cluster(here, "dddddd") as (there, _):
        result = await run(here, "drain", "decode-0", "--yes", "--force")
        assert result.exit_code == ExitCode.FAILED
        assert "belongs to cluster 1f2e3d, not to dddddd" in result.stderr
        assert there.control.told == []


@pytest.mark.parametrize(
    ("answer", "code"),
    [("y\n", 0), ("n\n", ExitCode.REFUSED), ("\n", ExitCode.REFUSED), ("\x04", ExitCode.REFUSED)],
    ids=["yes", "no", "default", "end of input"],
)
async def test_a_terminal_is_asked(here: Machine, answer: str, code: int) -> None:
    async with cluster(here) as (there, http):
        words = ("drain", "decode-0", "--force")
        done, output = await asyncio.to_thread(here.run_in_terminal, *words, answer=answer)
        assert done == code, output
        assert NAMED.format(http=http) in output
        assert "Drain decode-0 of cluster 1f2e3d? [y/N]" in output
        assert bool(there.control.told) is (code == 0)
        assert code == 0 or "nothing was changed" in output


def test_the_last_router_is_kept_without_force(
    here: Machine, process: subprocess.Popen[str]
) -> None:
    here.add("1f2e3d", "127.0.0.1:1", {"router": process.pid, "decode-0": 2})
    named = NAMED.format(http="127.0.0.1:1")
    refused = here.run("drain", "router", "--yes")
    assert refused.exit_code == ExitCode.REFUSED
    assert f"router is the last router of {named}" in refused.stderr
    assert process.poll() is None
    shown = here.run("drain", "router", "--dry-run")
    assert shown.exit_code == 0
    assert f"{named}: drain router" in shown.stdout
    assert process.poll() is None
    done = here.run("drain", "router", "--yes", "--force")
    assert done.exit_code == 0, done.output
    assert process.wait(DEADLINE_S) != 0


def test_one_of_two_routers_is_drained_once_that_is_confirmed(
    here: Machine, process: subprocess.Popen[str]
) -> None:
    here.add("1f2e3d", "127.0.0.1:1", {"router-0": process.pid, "router-1": os.getpid()})
    refused = here.run("drain", "router-0")
    assert refused.exit_code == ExitCode.REFUSED
    assert "give --yes" in refused.stderr
    assert process.poll() is None
    assert here.run("drain", "router-0", "--yes").exit_code == 0
    process.wait(DEADLINE_S)


@pytest.mark.parametrize("change", ["restarted", "other process", "ended", "cluster ended"])
def test_a_router_that_changes_during_the_question_is_left_alone(
    here: Machine,
    process: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """Whatever has its pid by then may belong to another program of this user."""
    with child(SLEEPER) as other:
        state = here.add("1f2e3d", "127.0.0.1:1", {"router-0": process.pid, "router-1": 1})

        def confirm(*_: object, **__: object) -> None:
            if change == "restarted":
                here.change(state, {"router-0": other.pid, "router-1": 1})
            elif change == "other process":
                # As if the pid of the router had been given to another process.
                real = process_identity._look
                monkeypatch.setattr(
                    process_identity,
                    "_look",
                    lambda pid: ("S", 7) if pid == process.pid else real(pid),
                )
            elif change == "ended":
                process.kill()
                process.wait(DEADLINE_S)
            else:
                (Path(state.run_directory) / "cluster.json").unlink()

        monkeypatch.setattr(worker_commands, "confirm", confirm)
        result = here.run("drain", "router-0")
        assert result.exit_code == ExitCode.FAILED, result.output
        assert "router-0 of" in result.stderr
        assert "has ended or was restarted: nothing was changed" in result.stderr
        assert other.poll() is None
        assert change == "ended" or process.poll() is None


def test_a_router_that_ends_before_its_signal_is_reported(
    here: Machine, process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here.add("1f2e3d", "127.0.0.1:1", {"router-0": process.pid, "router-1": 1})

    def kill(*_: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    result = here.run("drain", "router-0", "--yes")
    monkeypatch.undo()
    assert result.exit_code == ExitCode.FAILED, result.output
    assert "has ended: nothing was changed" in result.stderr


async def test_a_pool_that_is_needed_is_emptied_by_force_alone(here: Machine) -> None:
    async with fronts(local_prefill="never") as there:
        http = there.http.base_url.netloc.decode()
        here.add("1f2e3d", http)
        refused = await run(here, "scale", "prefill", "0", "--yes")
        assert refused.exit_code == ExitCode.REFUSED, refused.output
        assert "no prefill worker would be left" in refused.stderr
        assert there.sizes.sizes == {}
        done = await run(here, "scale", "prefill", "0", "--yes", "--force")
        assert done.exit_code == 0, done.output
        assert there.sizes.sizes == {"prefill": 0}


async def test_errors_name_the_router(here: Machine) -> None:
    async with cluster(here) as (there, http):
        there.sizes.away = True
        result = await run(here, "scale", "decode", "2", "--yes")
        assert result.exit_code == ExitCode.FAILED
        assert f"error: router {http}: Redis does not answer" in result.stderr
    gone = await run(here, "scale", "decode", "2", "--yes")
    assert gone.exit_code == ExitCode.FAILED
    assert f"no router answers at http://{http}" in gone.stderr


def test_a_router_elsewhere_is_not_signaled(here: Machine) -> None:
    result = here.run("drain", "router-0", "--yes", "--http", "127.0.0.1:1")
    assert result.exit_code == ExitCode.FAILED
    assert "the cluster at 127.0.0.1:1 has no router-0 on this machine" in result.stderr


def test_a_node_without_workers_is_left_without_a_question(here: Machine) -> None:
    result = here.run("leave")
    assert result.exit_code == 0
    assert "none of your workers runs on this node" in result.stderr


def test_leaving_a_node_names_the_clusters_and_is_confirmed(here: Machine) -> None:
    folder = here.folder / "baton-node-1f2e3d" / "workers"
    with child(SIGNER, str(folder), "decode-0") as worker:
        shown = here.run("leave", "--dry-run")
        assert shown.exit_code == 0
        assert shown.stdout == "cluster 1f2e3d: drain decode-0 on this node\n"
        refused = here.run("leave")
        assert refused.exit_code == ExitCode.REFUSED
        assert "cluster 1f2e3d: drain decode-0 on this node" in refused.stderr
        assert worker.poll() is None
        # The lock of the roll goes with the process.
        assert here.run("leave", "--yes").exit_code == 0
        worker.wait(DEADLINE_S)


COMPLETED: list[tuple[str, set[str]]] = [
    ("drain ", {"router-0", "router-1", "decode-0", "prefill-0"}),
    ("drain pre", {"prefill-0"}),
    ("role ", {"decode-0", "prefill-0"}),
    ("role decode-0 ", {"prefill", "decode"}),
    ("scale ", {"decode", "prefill"}),
    ("drain --cluster ", {"1f2e3d"}),
    ("drain --cluster other ", set()),
    ("role --http localhost:1 ", {"decode-0", "prefill-0"}),
    ("role --http localhost:2 ", set()),
]


def completed(here: Machine, line: str) -> set[str]:
    words = f"baton {line}"
    done = subprocess.run(
        [sys.executable, "-m", "baton"],
        env=os.environ
        | {
            "TMPDIR": str(here.folder),
            "_BATON_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(("line", "names"), COMPLETED, ids=[line for line, _ in COMPLETED])
def test_names_are_completed(here: Machine, line: str, names: set[str]) -> None:
    pids = dict.fromkeys(("router-0", "router-1", "decode-0", "prefill-0", "valkey"), 1)
    here.add("1f2e3d", "127.0.0.1:1", pids)
    assert completed(here, line) == names


def test_completion_never_fails(here: Machine) -> None:
    assert completed(here, "drain ") == set()
    (here.folder / "baton-broken").mkdir()
    (here.folder / "baton-broken" / "cluster.json").write_text("{")
    assert completed(here, "drain ") == set()


def documents(result: Result) -> Any:
    return json.loads(result.stdout)


async def test_status_for_programs(here: Machine) -> None:
    async with cluster(here) as (_, http):
        result = await run(here, "status", "-o", "json")
        found = documents(result)
        assert (found["cluster"], found["model"], found["router"]) == ("1f2e3d", "tiny", http)
        assert found["healthy"] is (result.exit_code == 0)
        assert found.keys() == {
            *("cluster", "model", "router", "healthy", "health", "supervisor", "autoscaler"),
            *("host", "workers_withheld", "workers", "refused_workers", "slots", "pairs"),
        }


def test_status_says_which_address_it_asks(here: Machine) -> None:
    here.add("1f2e3d", "127.0.0.1:1")
    here.add("bbbbbb", "127.0.0.1:1")
    result = here.run("status")
    assert result.exit_code == ExitCode.USAGE
    assert "choose one with --cluster ID" in result.stderr


def test_keys_and_models_for_programs(here: Machine, tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    made = here.run("keys", "create", "ann", "--file", file, "--scope", "admin", "--tenant", "a")
    assert made.exit_code == 0, made.output
    result = here.run("keys", "list", "--file", file, "-o", "json")
    (key,) = documents(result)["keys"]
    assert len(key.pop("sha256_prefix")) == 12
    assert key == {
        "name": "ann",
        "tenant": "a",
        "scopes": ["admin"],
        "priority": 0,
        "requests_per_minute": 0,
        "tokens_per_minute": 0,
        "concurrency": 0,
        "budget": 0.0,
        "budget_period": "month",
        "expires_at": None,
        "expired": False,
    }
    assert made.stdout.strip() not in result.stdout
    assert here.run("keys", "create", "x", "--file", file, "--scope", "king").exit_code == 2
    models = documents(here.run("model", "list", "-o", "json"))["models"]
    assert models
    for one in models:
        assert one.keys() == {"name", "cached", "bytes", "source", "path"}


def test_a_table_in_a_pipe_is_not_wrapped(here: Machine, tmp_path: Path) -> None:
    folder = tmp_path / ("deep-" * 40)
    folder.mkdir()
    file = str(folder / "keys.toml")
    for name in ("a" * 60, "b" * 60):
        assert here.run("keys", "create", name, "--file", file).exit_code == 0
    lines = here.run("keys", "list", "--file", file).stdout.splitlines()
    assert len(lines) == 3
    assert all(len(line.split()) >= 6 for line in lines[1:])
    assert max(map(len, lines)) > 100
