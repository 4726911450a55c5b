"""Pods of one worker find the pod of rank 0, and only the right ones enter."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.tls import TlsConfig
from baton.errors import ConfigError
from baton.v1 import rank_pb2
from deploy.processes.ports import free_port
from deploy.processes.process_identity import ProcessIdentity
from deploy.workers import pod_group
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.pod_group import Admission, Entrance, PodGroup, enter
from tests.support.certificates import Authority

WAIT_S = 60.0
HOST = "127.0.0.1"
SECRET = "a-secret-that-is-long-enough-for-it"
ADMISSION = Admission("prefill-0", "10.0.0.7", 1234, "token")


def pool(tp: int = 4, placement: Any = "pack") -> PoolConfig:
    return PoolConfig(name="prefill", role="prefill", tp=tp, rank_placement=placement)


def settings(**fields: Any) -> ActorSettings:
    pools = (pool(), PoolConfig(name="decode", role="decode"))
    told: dict[str, Any] = {"pools": pools, "cluster_secret": SECRET, **fields}
    return ActorSettings(
        config=Config(**told).model_dump(mode="json"),
        pool="prefill",
        slot="prefill-0",
        model_path="",
        model_name="a",
        draft_model_path="",
        redis_url="",
        cluster_id="a",
        launcher=ProcessIdentity.own(),
    )


def group(index: int, size: int = 3) -> PodGroup:
    return PodGroup(HOST, size, index)


def told(index: int | str, size: int | str = 2, leader: str = "prefill-0.prefill.ns") -> PodGroup:
    return PodGroup.told(
        {
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": leader,
        }
    )


def test_a_pod_learns_its_place_from_the_variables_of_its_set() -> None:
    assert told(1) == PodGroup("prefill-0.prefill.ns", 2, 1)
    assert PodGroup.told({}) == PodGroup()
    # A group of one pod has all ranks there.
    assert told(0, 1) == PodGroup()


@pytest.mark.parametrize(
    ("index", "size", "leader", "message"),
    [
        ("one", 2, "a", "LWS_WORKER_INDEX: expected a number, got 'one'"),
        (0, "-2", "a", "LWS_GROUP_SIZE: expected a number, got '-2'"),
        (2, 2, "a", "LWS_WORKER_INDEX is 2, which must be below LWS_GROUP_SIZE, 2"),
        (1, 2, "", "LWS_LEADER_ADDRESS must name the host of rank 0"),
    ],
)
def test_variables_that_make_no_sense_are_named(
    index: int | str, size: int | str, leader: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        told(index, size, leader)
    assert message in caught.value.message


def test_pods_have_equal_shares_of_the_ranks() -> None:
    assert [group(index, 2).ranks_of(pool()) for index in (0, 1)] == [range(2), range(2, 4)]
    assert PodGroup().ranks_of(pool(placement="strict_pack")) == range(4)


@pytest.mark.parametrize(
    ("size", "tp", "placement", "message"),
    [
        (3, 4, "pack", "4 ranks cannot be divided among the 3 pods of a worker"),
        (2, 1, "pack", "set tp to a multiple of 2"),
        (2, 4, "strict_pack", 'set rank_placement = "pack"'),
        (1, 4, "pack", "this process has no group (LWS_GROUP_SIZE)"),
    ],
)
def test_ranks_that_do_not_fit_the_group_are_refused(
    size: int, tp: int, placement: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PodGroup(HOST, size, 0).ranks_of(pool(tp, placement))
    assert message in caught.value.message


def with_certificates(folder: Path) -> ActorSettings:
    return settings(cluster_secret="", tls=TlsConfig(folder=str(folder), clear_kv=True))


def opened(own: ActorSettings | None = None) -> Entrance:
    return Entrance(group(0), own or settings(), HOST, 0)


def entering(
    threads: ThreadPoolExecutor, place: PodGroup, port: int, own: ActorSettings | None = None
) -> Future[Admission]:
    return threads.submit(enter, place, own or settings(), port, WAIT_S)


@pytest.mark.parametrize("has_certificates", [False, True])
def test_all_pods_learn_where_rank_0_listens(tmp_path: Path, has_certificates: bool) -> None:
    own = settings()
    if has_certificates:
        own = with_certificates(Authority(tmp_path).folder)
    entrance = opened(own)
    with ThreadPoolExecutor(2) as threads:
        calls = [entering(threads, group(index), entrance.port, own) for index in (1, 2)]
        entrance.wait(WAIT_S)
        assert not any(call.done() for call in calls)
        entrance.admit(ADMISSION)
        assert [call.result(WAIT_S) for call in calls] == [ADMISSION] * 2


def test_a_pod_waits_for_the_one_of_rank_0() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        calls = [entering(threads, group(index), port) for index in (1, 2)]
        entrance = Entrance(group(0), settings(), HOST, port)
        entrance.wait(WAIT_S)
        entrance.admit(ADMISSION)
        assert [call.result(WAIT_S) for call in calls] == [ADMISSION] * 2


def test_a_pod_without_rank_0_says_where_to_look() -> None:
    port = free_port()
    with pytest.raises(ConfigError) as caught:
        enter(group(1), settings(), port, 0.1)
    message = caught.value.message
    assert f"rank 0 at {HOST}:{port} has not answered within 0 s" in message
    assert "NetworkPolicies" in message


def test_rank_0_names_the_pods_that_are_missing() -> None:
    entrance = opened()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(enter, group(1), settings(), entrance.port, WAIT_S / 10)
        until = time.monotonic() + WAIT_S
        while not entrance._here and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(ConfigError) as caught:
            entrance.wait(0.0)
        assert "pods [2] of the 3" in caught.value.message
        assert f"port {entrance.port}" in caught.value.message
        with pytest.raises(ConfigError, match="has not answered"):
            call.result(WAIT_S)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entrance = opened()
    monkeypatch.setattr(pod_group, "VERSION", "0.0.9")
    request = rank_pb2.EnterRequest(index=1, size=3, version="0.2.0", settings="")
    assert entrance._refusal(request) == (
        "rank 0's pod runs Baton 0.0.9, and this one '0.2.0': give all pods of a group the same "
        "image"
    )
    entrance.close()


@pytest.mark.parametrize(
    ("place", "fields", "message"),
    [
        (group(1), {"model": "another"}, "configuration or model revision differs"),
        (group(1, 2), {}, "number 1 of 2, and rank 0's group has 3"),
        (group(3, 4), {}, "LWS_LEADER_ADDRESS leads to another group"),
        (group(1), {"cluster_secret": "b" * 32}, "only accepts calls of its own cluster"),
    ],
)
def test_a_pod_of_another_kind_is_refused(
    place: PodGroup, fields: dict[str, Any], message: str
) -> None:
    entrance = opened()
    try:
        with pytest.raises(ConfigError) as caught:
            enter(place, settings(**fields), entrance.port, WAIT_S)
        assert message in caught.value.message
    finally:
        entrance.close()


def test_only_workers_enter_where_there_are_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    # A router that calls itself a worker by its files' name.
    other = tmp_path / "other"
    other.mkdir()
    files = authority.sign("fake", "router")
    assert files.certificate is not None
    assert files.key is not None
    assert files.authority is not None
    (other / "worker.pem").write_bytes(files.certificate.read_bytes())
    (other / "worker.key").write_bytes(files.key.read_bytes())
    (other / "worker.key").chmod(0o600)
    (other / "ca.pem").write_bytes(files.authority.read_bytes())
    entrance = opened(with_certificates(authority.folder))
    try:
        with pytest.raises(ConfigError, match="is for worker; the certificate names router"):
            enter(group(1), with_certificates(other), entrance.port, WAIT_S)
    finally:
        entrance.close()


def test_a_port_that_is_taken_is_named() -> None:
    entrance = opened()
    try:
        with pytest.raises(ConfigError, match="another --group-port"):
            Entrance(group(0), settings(), HOST, entrance.port)
    finally:
        entrance.close()
