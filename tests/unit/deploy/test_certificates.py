"""`baton certs`: what stands in the certificates, who can read the keys, and what is refused."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from baton.errors import ConfigError
from baton.security.tls import ROLES, TlsFiles, client_context, role_name, server_context
from deploy import certificates
from deploy.cli.main import app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificates.init(tmp_path / "certs", ["llm.example.com", "10.0.0.5"], days=30)
    return tmp_path / "certs"


def read(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def names_of(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in found.value]


def test_every_role_has_a_certificate_that_names_it_alone(folder: Path) -> None:
    for role in ROLES:
        names = names_of(read(folder, role))
        assert [name for name in names if name.endswith("baton.internal")] == [role_name(role)]
        read(folder, role).verify_directly_issued_by(read(folder, "ca"))


def test_who_serves_stands_for_the_hosts_and_who_only_calls_for_none(folder: Path) -> None:
    for role in ("router", "worker", "supervisor", "redis"):
        assert {"localhost", "127.0.0.1", "::1", "llm.example.com", "10.0.0.5"} <= set(
            names_of(read(folder, role))
        )
    assert names_of(read(folder, "client")) == [role_name("client")]


def test_a_client_cannot_play_a_server(folder: Path) -> None:
    purposes = read(folder, "client").extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert list(purposes.value) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_keys_are_their_owners_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = list(folder.glob("*.key"))
    assert len(keys) == len(ROLES) + 1
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_days_are_as_asked_and_never_beyond_the_authority_s(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    certificates.init(tmp_path, days=30, authority_days=40, now=now)
    assert read(tmp_path, "worker").not_valid_after_utc == now + timedelta(days=30)
    certificates.issue(tmp_path, "long", "client", days=400, now=now)
    assert read(tmp_path, "long").not_valid_after_utc == now + timedelta(days=40)


def test_nothing_is_overwritten_by_init(folder: Path) -> None:
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match="certs renew"):
        certificates.init(folder)
    assert (folder / "ca.key").read_bytes() == before


def test_renewing_keeps_hosts_and_roles_and_changes_keys(folder: Path) -> None:
    olds = {role: (folder / f"{role}.key").read_bytes() for role in ROLES}
    authority = (folder / "ca.pem").read_bytes()
    assert set(certificates.renew(folder, hosts=["10.0.0.6"], days=90)) == set(ROLES)
    for role in ROLES:
        assert (folder / f"{role}.key").read_bytes() != olds[role]
        client_context(TlsFiles.in_folder(folder, role))
    assert {"10.0.0.5", "10.0.0.6", role_name("worker")} <= set(names_of(read(folder, "worker")))
    assert names_of(read(folder, "client")) == [role_name("client")]
    assert (folder / "ca.pem").read_bytes() == authority


def test_one_alone_is_renewed(folder: Path) -> None:
    before = (folder / "worker.pem").read_bytes()
    assert certificates.renew(folder, ["router"]) == ["router"]
    assert (folder / "worker.pem").read_bytes() == before


def test_without_the_authority_s_key_nothing_is_signed(folder: Path) -> None:
    (folder / "ca.key").unlink()
    before = (folder / "router.pem").read_bytes()
    with pytest.raises(ConfigError, match="CA's key is kept"):
        certificates.renew(folder)
    assert (folder / "router.pem").read_bytes() == before


def test_an_authority_that_has_ended_says_what_to_do(tmp_path: Path) -> None:
    past = datetime.now(UTC) - timedelta(days=10)
    certificates.init(tmp_path, days=1, authority_days=2, now=past)
    with pytest.raises(ConfigError, match="another with `baton certs init`"):
        certificates.renew(tmp_path)
    assert {one.fault for one in certificates.show(tmp_path)} == {"expired"}


@pytest.mark.parametrize("host", ["a b", "llm.example.com:8000", "", "worker.baton.internal", "*"])
def test_what_is_no_host_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError):
        certificates.init(tmp_path / "certs", [host])
    assert not (tmp_path / "certs").exists()


def test_show_tells_of_strangers(folder: Path, tmp_path: Path) -> None:
    certificates.init(tmp_path / "other")
    (folder / "worker.pem").write_bytes((tmp_path / "other" / "worker.pem").read_bytes())
    faults = {one.name: one.fault for one in certificates.show(folder)}
    assert faults["worker"] == "not signed by this CA"
    assert faults["router"] == ""


def test_the_commands(tmp_path: Path) -> None:
    runner, folder = CliRunner(), str(tmp_path / "certs")

    def run(*arguments: str) -> tuple[int, str]:
        result = runner.invoke(app, ["certs", *arguments])
        return result.exit_code, result.output

    assert run("init", folder, "--san", "h.example.com", "--days", "20")[0] == 0
    assert run("init", folder)[0] == 1
    assert run("issue", "alice", folder)[0] == 0
    assert run("issue", "alice", folder)[0] == 1
    assert run("issue", "bob", folder, "--role", "king")[0] == 2
    assert run("renew", folder, "--only", "alice")[0] == 0
    code, text = run("show", folder)
    assert code == 0
    assert "alice" in text
    assert run("show", str(tmp_path / "nothing"))[0] == 1


def test_unusable_files_are_reported_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        server_context(TlsFiles.in_folder(tmp_path / "nowhere", "router"))
    mixed = TlsFiles(folder / "router.pem", folder / "worker.key", folder / "ca.pem")
    with pytest.raises(ConfigError, match=r"worker\.key is not the key of .*router\.pem"):
        mixed.check()
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="PEM"):
        client_context(TlsFiles(authority=tmp_path / "text.pem"))


def test_a_server_asks_for_certificates_where_it_has_an_authority(folder: Path) -> None:
    files = TlsFiles.in_folder(folder, "router")
    assert server_context(files).verify_mode is ssl.CERT_REQUIRED
    assert server_context(TlsFiles(files.certificate, files.key)).verify_mode is ssl.CERT_NONE
