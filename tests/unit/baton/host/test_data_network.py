"""Where a machine is in the data network."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.host.data_network import DataAddress, find_address

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "2001:db8::5"],
    "eth1": ["2001:db8:1::5", "10.1.0.5"],
    "eth2": [],
}


@pytest.fixture
def sys_net(tmp_path: Path) -> Path:
    (tmp_path / "eth1/device/infiniband/mlx5_3").mkdir(parents=True)
    (tmp_path / "eth1/dev_port").write_text("1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("network", "interface", "address"),
    [
        ("10.1.0.0/16", "eth1", "10.1.0.5"),
        ("10.1.0.5", "eth1", "10.1.0.5"),
        ("10.0.0.99/24", "eth0", "10.0.0.5"),
        ("2001:db8:1::/48", "eth1", "2001:db8:1::5"),
        ("eth1", "eth1", "10.1.0.5"),
        ("lo", "lo", "127.0.0.1"),
    ],
)
def test_a_cidr_or_an_interface_is_found(
    sys_net: Path, network: str, interface: str, address: str
) -> None:
    found = find_address(network, ADDRESSES, sys_net)
    assert (found.interface, found.address) == (interface, address)


def test_libraries_stay_in_the_network(sys_net: Path) -> None:
    assert find_address("eth1", ADDRESSES, sys_net).variables == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_HCA": "=mlx5_3:2",
        "UCX_NET_DEVICES": "mlx5_3:2",
    }
    assert find_address("eth0", ADDRESSES, sys_net).variables == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_DISABLE": "1",
        "UCX_NET_DEVICES": "eth0",
    }


@pytest.mark.parametrize("network", ["10.2.0.0/16", "eth2", "eth9"])
def test_without_an_address_the_error_lists_those_there_are(sys_net: Path, network: str) -> None:
    with pytest.raises(ConfigError, match=rf"in {network}: it has lo 127\.0\.0\.1, .*eth0 10\.0"):
        find_address(network, ADDRESSES, sys_net)


def test_this_machine_has_loopback() -> None:
    assert find_address("127.0.0.0/8") == DataAddress("lo", "127.0.0.1")
