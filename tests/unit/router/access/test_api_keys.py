"""API keys: callers by their keys, and the file that `baton keys` writes."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from typer.testing import CliRunner

from baton.config.access import KeyConfig
from baton.config.cluster import Config, load_config
from baton.config.keys_file import hash_of, read_keys, write_keys
from baton.errors import ConfigError, Unauthenticated
from baton.host.background import end_tasks
from baton.security.cluster_secret import cache_salt
from baton.telemetry.metrics import RouterMetrics
from deploy.cli.main import app
from router.access.access import Access
from router.access.api_keys import ApiKeys, KeyWatch
from tests.support.router.front_fakes import MODEL, create_app, make_front


def key(name: str, secret: str, **fields: object) -> KeyConfig:
    digest = hashlib.sha256(secret.encode()).hexdigest() if secret else ""
    return KeyConfig(**{"name": name, "tenant": "default", "sha256": digest} | fields)


KEYS = [key("one", "secret-1", tenant="acme", priority=3), key("two", "secret-2")]


@pytest.mark.parametrize("header", ["Bearer secret-1", "bearer  secret-1 ", "BEARER secret-1"])
def test_a_known_key_names_its_caller(header: str) -> None:
    caller = ApiKeys(KEYS, required=True).caller(header)
    assert (caller.principal.tenant, caller.principal.key_id) == ("acme", "one")
    assert caller.priority == 3


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "ü"]
)
def test_an_unknown_key_is_refused_if_one_is_required(header: str) -> None:
    caller = ApiKeys(KEYS, required=False).caller(header)
    assert (caller.principal.tenant, caller.principal.key_id) == ("default", "")
    assert caller.key is None
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys(KEYS, required=True).caller(header)
    assert "wrong" not in caught.value.message


def test_an_entry_without_a_hash_is_for_all_others() -> None:
    keys = ApiKeys([*KEYS, key("anyone", "", requests_per_minute=5)], required=False)
    assert keys.caller("Bearer wrong").principal.key_id == "anyone"
    assert keys.caller("").key is not None
    assert keys.caller("Bearer secret-2").principal.key_id == "two"


# The file of keys, while a router runs

RUNNER = CliRunner()


def baton_keys(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What the command prints: on its output, and on its error stream."""
    done = RUNNER.invoke(app, ["keys", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout.strip(), done.stderr


async def test_a_key_is_created_used_and_revoked_without_a_restart(tmp_path: Path) -> None:
    file = str(tmp_path / "sub" / "keys.json")
    first, _ = baton_keys("create", "ann", "--file", file, "--tenant", "acme")
    front = make_front(keys_file=file)
    assert front.config.require_key
    access = Access(front.config, front.metrics)
    watch = KeyWatch(Path(file), (), access.set_keys, front.metrics)
    await watch.begin()
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    transport = httpx.ASGITransport(create_app(*parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def status(key: str, path: str = "/v1/models") -> int:
            await watch.poll()
            answer = await client.get(path, headers={"authorization": f"Bearer {key}"})
            return answer.status_code

        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}
        answer = await client.post(
            "/v1/completions", json=body, headers={"authorization": f"Bearer {first}"}
        )
        assert answer.status_code == 200
        # A tenant that no configuration has named.
        assert front.dispatcher.requests[-1].cache_salt == cache_salt("", "acme")
        assert await status(first, "/metrics") == 403
        second, _ = baton_keys("create", "bob", "--file", file, "--scope", "metrics")
        assert await status(second, "/metrics") == 200
        assert await status(second) == 403
        assert await status(first) == 200
        third, said = baton_keys("rotate", "ann", "--file", file, "--keep", "1h")
        assert "ann.until-" in said
        assert len({first, second, third}) == 3
        assert [await status(key) for key in (first, third)] == [200, 200]
        aside = next(key for key in read_keys(Path(file)) if key.name.startswith("ann.until-"))
        assert aside.tenant == "acme"
        assert aside.expires_at is not None
        baton_keys("revoke", aside.name, "--file", file)
        assert [await status(key) for key in (first, third)] == [401, 200]
        # A broken file changes nothing, and is reported; so is a missing one.
        whole = _put(file, "{")
        for broken in ("{", '{"keys": [{"name": "x", "admin": true}]}', None):
            _put(file, broken)
            assert [await status(key) for key in (first, third)] == [401, 200]
        assert front.count("key_file_failures_total") == 3
        _put(file, whole)
        assert await status(third) == 200
        baton_keys("revoke", "ann", "--file", file)
        assert await status(third) == 401


async def test_a_look_at_the_file_that_fails_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.access.api_keys.KEY_FILE_POLL_S", 0.001)
    file = str(tmp_path / "keys.json")
    baton_keys("create", "ann", "--file", file)
    front = make_front(keys_file=file)
    taken: list[int] = []
    watch = KeyWatch(Path(file), (), lambda keys: taken.append(len(keys)), front.metrics)
    await watch.begin()
    poll, odd = watch.poll, iter([True])

    async def once() -> None:
        if next(odd, False):
            raise MemoryError
        await poll()

    monkeypatch.setattr(watch, "poll", once)
    watching = asyncio.create_task(watch.run())
    baton_keys("create", "bob", "--file", file)
    async with asyncio.timeout(60):
        while taken != [1, 2]:
            await asyncio.sleep(0.001)
    await end_tasks([watching])


def _put(file: str, text: str | None) -> str:
    """Change the file, or take it away; what it was."""
    path = Path(file)
    before = path.read_text() if path.exists() else ""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    return before


def test_the_command_shows_a_key_once_and_keeps_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, said = baton_keys(
        *("create", "ann", "--file", str(file), "--scope", "admin", "--expires-in", "30d"),
        *("--requests-per-minute", "60", "--concurrency", "4"),
    )
    assert key.startswith("baton-")
    assert len(key) > 40
    assert "once" in said
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert key not in text
    assert hash_of(key) in text
    (kept,) = read_keys(file)
    assert (kept.scopes, kept.requests_per_minute, kept.concurrency) == (("admin",), 60, 4)
    assert kept.expires_at is not None
    left = kept.expires_at - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left <= datetime.timedelta(days=30)
    shown, _ = baton_keys("list", "--file", str(file))
    assert "ann" in shown
    assert "60 requests/min" in shown
    assert key not in shown


FAULTS = [
    (("create", "ann"), 1, "key 'ann' exists"),
    (("create", "a b"), 1, "name"),
    (("create", "bob", "--scope", "root"), 2, "'inference', 'metrics', 'admin'"),
    (("create", "bob", "--expires-in", "soon"), 2, "30d"),
    (("create", "bob", "--tenant", ""), 1, "write 'default'"),
    (("revoke", "bob"), 1, "no key 'bob'"),
    (("rotate", "bob"), 1, "no key 'bob'"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), FAULTS)
def test_bad_key_commands_name_their_fault(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    file = tmp_path / "keys.json"
    baton_keys("create", "ann", "--file", str(file))
    before = file.read_text()
    _, error = baton_keys(*arguments, "--file", str(file), code=code)
    assert said in error
    assert file.read_text() == before


@pytest.mark.parametrize("tenant", ["", " ", "a b", "a" * 65])
def test_a_tenant_has_a_name(tmp_path: Path, tenant: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "ann", "sha256": "0" * 64, "tenant": tenant}]}))
    with pytest.raises(ConfigError, match=r"`keys.0..tenant`: .*write 'default' for the tenant"):
        read_keys(file)
    with pytest.raises(ValidationError, match="write 'default'"):
        KeyConfig(name="ann", tenant=tenant)


def test_a_key_without_a_tenant_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """It would share the default tenant's cached prompts, files and batches."""
    file, toml = tmp_path / "keys.json", tmp_path / "baton.toml"
    file.write_text(json.dumps({"keys": [{"name": "ann", "sha256": "0" * 64}]}))
    with pytest.raises(ConfigError, match=r'`keys.0..tenant` is missing: write "default", or'):
        read_keys(file)
    toml.write_text(f'[[keys]]\nname = "ann"\nsha256 = "{"0" * 64}"\n')
    with pytest.raises(ConfigError, match=r'key `ann`.*: `tenant` is missing: write "default", or'):
        load_config(toml)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_keys(file, [])
    file.chmod(0o646)
    with pytest.raises(ConfigError, match="every user"):
        read_keys(file)
    with pytest.raises(ConfigError, match="baton keys create"):
        read_keys(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no file of API keys"):
        read_keys(tmp_path)


async def test_the_configurations_names_are_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    mine = KeyConfig(name="ann", tenant="default", sha256=hash_of("mine"))
    metrics = RouterMetrics(CollectorRegistry())
    access = Access(Config(keys=(mine,), keys_file=str(file)), metrics)
    for other in (key("ann", "other"), KeyConfig.model_copy(mine)):
        write_keys(file, [other])
        with pytest.raises(ConfigError, match="already has the key ann"):
            await KeyWatch(file, (mine,), access.set_keys, metrics).begin()


def test_an_expired_key_is_refused() -> None:
    ends = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)
    times = [ends - datetime.timedelta(seconds=1), ends]
    keys = ApiKeys(
        [key("ann", "secret", expires_at=ends)],
        required=True,
        now=lambda: times[0],
    )
    assert keys.caller("Bearer secret").principal.key_id == "ann"
    times.pop(0)
    with pytest.raises(Unauthenticated, match="expired"):
        keys.caller("Bearer secret")


def test_a_key_file_requires_keys(tmp_path: Path) -> None:
    assert Config(keys_file="k").require_key
    assert not Config(keys_file="k", require_key=False).require_key
    assert not Config().require_key
    toml = tmp_path / "baton.toml"
    toml.write_text(
        'keys_file = "k"\n[[keys]]\nname = "a"\ntenant = "default"\n'
        "expires_at = 2027-01-01T00:00:00Z\n"
        f'scopes = ["metrics"]\nsha256 = "{hash_of("a")}"\n'
    )
    config = load_config(toml)
    assert config.require_key
    # As the launcher passes it on to its routers.
    again = Config(**json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config
    with pytest.raises(ValueError, match="is no origin"):
        Config(allowed_origins=("chat.example.com",))
    with pytest.raises(ValueError, match="host:port"):
        Config(admin_http="8000")
