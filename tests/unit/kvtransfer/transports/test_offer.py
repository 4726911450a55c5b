"""kvtransfer/transports/offer.py: which host an offer names."""

from __future__ import annotations

import json

import pytest

from kvtransfer.transports.offer import are_on_two_hosts, host_of

HERE = json.dumps({"boot_id": "here", "pid": 1}).encode()


def test_a_process_knows_its_host_and_namespace() -> None:
    boot_id, pid_namespace = host_of("shm")
    assert boot_id
    assert pid_namespace.startswith("pid:[")


def test_offers_that_name_two_hosts() -> None:
    assert are_on_two_hosts(HERE, json.dumps({"boot_id": "there"}).encode())
    assert not are_on_two_hosts(HERE, json.dumps({"boot_id": "here", "pid": 2}).encode())


@pytest.mark.parametrize("other", [b"", b"{}", b"[1]", b"3", b"\xff", b"[" * 100_000])
def test_an_offer_that_names_no_host_may_be_of_this_one(other: bytes) -> None:
    assert not are_on_two_hosts(HERE, other)
    assert not are_on_two_hosts(other, HERE)
