"""A cluster of `baton certs init` with TLS, mutual TLS and keys: which clients it serves."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import grpc
import httpx
import pytest

from baton.client import Client, Message, Sampling, TlsFiles
from baton.client.http_api import api_errors, open_api
from baton.errors import BatonError, Unauthenticated
from baton.rpc.grpc_channel import open_blocking_channel
from baton.security.tls import client_context
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from baton.v1 import cache_pb2, cache_pb2_grpc
from deploy import certificates
from tests.support.certificates import Authority
from tests.support.e2e.cluster import BATON, PATIENT, START_S, UpProcess
from tests.support.tls_redis import owner_of, tls_redis, urls_of

pytestmark = pytest.mark.timeout(300)
FEW = Sampling(max_tokens=4, temperature=0.0)
ASKED = [Message("user", "Name a river.")]
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Secured:
    """A cluster, and whose certificates it knows."""

    up: UpProcess
    authority: Authority
    stranger: Authority
    key: str
    redis_port: int
    """0 where the store is the embedded one."""

    @property
    def url(self) -> str:
        return self.up.http.replace("http://", "https://")

    @property
    def client(self) -> TlsFiles:
        return TlsFiles.in_folder(self.authority.folder, "client")

    @property
    def records(self) -> dict[str, WorkerRecord]:
        """The workers, by slot."""

        async def read() -> dict[str, WorkerRecord]:
            async with redis_client(self.up.state.redis_url) as client:
                found = await Registry(client, self.up.cluster_id).all()
            return {record.slot: record for record in found.values()}

        return asyncio.run(read())

    @property
    def strangers(self) -> dict[str, TlsFiles | None]:
        """Credentials that are refused."""
        foreign = TlsFiles.in_folder(self.stranger.folder, "client")
        trusted = self.authority.certificate
        return {
            "no TLS": None,
            "no certificate": TlsFiles(authority=trusted),
            "a foreign certificate": TlsFiles(foreign.certificate, foreign.key, trusted),
            "a foreign authority": foreign,
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Its store speaks TLS, and all of it runs by the roles' users."""
    folder = tmp_path_factory.mktemp("secured")
    authority, stranger = Authority(folder), Authority(folder, "stranger")
    # In a deployment the CA's key is kept elsewhere.
    (authority.folder / "ca.key").rename(folder / "kept.key")
    keys = str(folder / "keys.toml")
    made = [BATON, "keys", "create", "tester", "--file", keys, "--scope", "admin"]
    key = subprocess.run(made, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    options = ["--certs", str(authority.folder), "--keys-file", keys, "--routers", "2"]
    options += ["--client-ca", str(authority.certificate), "--transport", "grpc"]
    with ExitStack() as stack:
        port = stack.enter_context(tls_redis(authority, folder))
        urls = {f"BATON_{name.upper()}": url for name, url in urls_of(port).items()}
        env = PATIENT | urls
        up = stack.enter_context(UpProcess(*options, "--local-prefill", "never", env=env))
        up.wait_ready()
        (folder / "kept.key").rename(authority.folder / "ca.key")
        yield Secured(up, authority, stranger, key, port)
        up.terminate()
        assert up.wait() == 0, up.text


def chat(secured: Secured, url: str, key: str, files: TlsFiles | None) -> str:
    """An answer over HTTP. Raises BatonError."""
    body = {
        "model": secured.up.model,
        "messages": [asdict(message) for message in ASKED],
        "max_tokens": FEW.max_tokens,
        "temperature": FEW.temperature,
    }
    with api_errors(), open_api(url, key, files) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def test_it_serves_over_https_and_grpc(secured: Secured) -> None:
    over_http = chat(secured, secured.url, secured.key, secured.client)
    with Client(secured.up.grpc, secured.key, tls=secured.client) as client:
        over_grpc = client.chat(ASKED, FEW)
    assert over_http == over_grpc.text
    assert over_http


def test_kv_went_by_grpc_between_processes_that_proved_themselves(secured: Secured) -> None:
    chat(secured, secured.url, secured.key, secured.client)
    context = client_context(secured.client)
    headers = {"authorization": f"Bearer {secured.key}"}
    labels = '.*peer="decode-0",transport="grpc",worker="prefill-0"'
    pair = re.compile(rf"^baton_transfer_pairs{{{labels}}} 1.0$", re.MULTILINE)
    every, page, until = "# 2 of 2 workers answered", "", time.monotonic() + DEADLINE_S
    # A worker's gauges follow its heartbeats, and a busy one is late with its page.
    while not (pair.search(page) and every in page) and time.monotonic() < until:
        answer = httpx.get(
            f"{secured.url}/metrics/cluster", verify=context, headers=headers, timeout=DEADLINE_S
        )
        page = answer.text
        time.sleep(0.1)
    assert every in page
    assert pair.search(page)


@pytest.mark.parametrize(
    "kind", ["no TLS", "no certificate", "a foreign certificate", "a foreign authority"]
)
def test_strangers_get_in_nowhere(secured: Secured, kind: str) -> None:
    """With the right key, but without what proves who they are: on every plane."""
    files = secured.strangers[kind]
    url = secured.up.http if files is None else secured.url
    with pytest.raises(BatonError):
        chat(secured, url, secured.key, files)
    with Client(secured.up.grpc, secured.key, tls=files) as client, pytest.raises(BatonError):
        client.chat(ASKED, FEW, deadline_s=DEADLINE_S)
    for record in secured.records.values():
        assert _drop_cache(record.address, files) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(httpx.TransportError):
            _metrics(record.metrics_address, files)


def test_a_certificate_is_no_key(secured: Secured) -> None:
    for key in ("", "wrong"):
        with pytest.raises(Unauthenticated):
            chat(secured, secured.url, key, secured.client)
        client = Client(secured.up.grpc, key, tls=secured.client)
        with client, pytest.raises(Unauthenticated):
            client.chat(ASKED, FEW)


def test_a_client_of_the_api_may_ask_workers_nothing(secured: Secured) -> None:
    for record in secured.records.values():
        assert _drop_cache(record.address, secured.client) is grpc.StatusCode.PERMISSION_DENIED
        assert _metrics(record.metrics_address, secured.client) == httpx.codes.FORBIDDEN


def _drop_cache(address: str, files: TlsFiles | None) -> grpc.StatusCode:
    with open_blocking_channel(address, files, None if files is None else "worker") as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).DropCache
        answer = call.future(cache_pb2.DropCacheRequest(), timeout=DEADLINE_S)
        code: grpc.StatusCode = answer.code()
        return code


def _metrics(address: str, files: TlsFiles | None) -> int:
    verify = False if files is None else client_context(files)
    scheme = "http" if files is None else "https"
    with httpx.Client(trust_env=False, verify=verify, timeout=DEADLINE_S) as client:
        return client.get(f"{scheme}://{address}/metrics").status_code


def test_commands_find_the_way(secured: Secured) -> None:
    """Those on this machine by themselves, others by what they are given."""
    files = secured.client
    assert files.certificate is not None
    given: tuple[str, ...] = ("--ca", str(files.authority), "--certificate", str(files.certificate))
    given += ("--certificate-key", str(files.key))
    http = secured.url.removeprefix("https://")
    for arguments, code in (
        (("status", "--http", http), 0),
        (("status", "--http", secured.url, *given), 0),
        (("chat", "Hello!", "--max-tokens", "2", "--grpc", secured.up.grpc), 0),
        (("chat", "Hello!", "--max-tokens", "2", "--grpc", secured.up.grpc, *given), 0),
        (("chat", "Hello!", "--grpc", secured.up.grpc, *given[:2]), 1),
        (("bench", "serve", "--url", secured.url, "--rate", "2", "--seconds", "2", *given), 0),
    ):
        done = subprocess.run(
            [BATON, *arguments, "--api-key", secured.key],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_renewed_certificates_are_taken_up_by_both_fronts(secured: Secured) -> None:
    fronts = secured.url.removeprefix("https://"), secured.up.grpc
    old = {_shown(secured, front) for front in fronts}
    assert len(old) == 1
    certificates.renew(secured.authority.folder, ["router"])
    end = time.monotonic() + DEADLINE_S
    for front in fronts:
        # Two processes share a port, and look each for themselves.
        while any(_shown(secured, front) in old for _ in range(8)):
            assert time.monotonic() < end
            time.sleep(0.1)
    assert chat(secured, secured.url, secured.key, secured.client)


def _shown(secured: Secured, address: str) -> bytes | None:
    host, _, port = address.partition(":")
    context = client_context(secured.client)
    with (
        socket.create_connection((host, int(port)), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def test_no_role_has_asked_the_store_for_more_than_it_may(secured: Secured) -> None:
    # A client names its library, and a check asks how keys are evicted: either may be forbidden.
    optional = {"client|setinfo", "info"}
    with owner_of(secured.redis_port, secured.authority) as owner:
        denied = [one for one in owner.acl_log() if one["object"] not in optional]
        assert [(one["username"], one["object"]) for one in denied] == []


def test_beyond_this_machine_it_wants_keys_and_certificates(secured: Secured) -> None:
    certs = ("--certs", str(secured.authority.folder))
    for options, missing in (((), "API keys and TLS"), (certs, "API keys")):
        command = [BATON, "serve", "--http", "0.0.0.0:0", "--grpc", "127.0.0.1:0", *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_S)
        text = " ".join(done.stdout.split())
        assert done.returncode == 1
        assert f"without {missing}" in text
        assert "--insecure-listen" in text
