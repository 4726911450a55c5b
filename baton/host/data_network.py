"""The network of this machine in which KV blocks travel outside of authenticated connections."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}")
_SYS_NET = Path("/sys/class/net")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where this machine is in the data network."""

    interface: str
    address: str
    """Numeric address of the interface."""
    card: str = ""
    """RDMA device and port of the interface, such as ``mlx5_0:1``; empty if it has none."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that keep NCCL and UCX in this network."""
        found = {
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "UCX_NET_DEVICES": self.card or self.interface,
        }
        # Without a card of this network NCCL would take one of another.
        return found | ({"NCCL_IB_HCA": f"={self.card}"} if self.card else {"NCCL_IB_DISABLE": "1"})


def check_network(network: str) -> Network | None:
    """Return the network that a CIDR names; None for the name of an interface.

    Raises ValueError for other text.
    """
    try:
        return ipaddress.ip_network(network, strict=False)
    except ValueError:
        if "/" not in network and _INTERFACE.fullmatch(network):
            return None
    raise ValueError(
        f"data_network: {network!r} is neither a CIDR such as 10.1.0.0/16 nor an interface such as"
        " eth1"
    )


def find_address(
    network: str,
    addresses: Mapping[str, Sequence[str]] | None = None,
    sys_net: Path = _SYS_NET,
) -> DataAddress:
    """Find this machine's address in ``network``, an interface or a CIDR.

    ``addresses`` are those of each interface; by default this machine's. Raises ConfigError, with
    the addresses that there are, if none is in the network.
    """
    addresses = _addresses() if addresses is None else addresses
    wanted = check_network(network)
    for interface, found in addresses.items():
        # IPv4 first: an interface has a link-local address of IPv6 besides.
        for address in sorted(found, key=lambda one: ":" in one):
            if network == interface if wanted is None else ipaddress.ip_address(address) in wanted:
                return DataAddress(interface, address, _card(sys_net / interface))
    listed = ", ".join(f"{name} {one}" for name, found in addresses.items() for one in found)
    raise ConfigError(
        f"data_network: no address of this machine is in {network}: it has {listed or 'none'}"
    )


def _addresses() -> dict[str, list[str]]:
    import psutil  # noqa: PLC0415 - only workers with a data network need it

    return {
        name: [each.address for each in found if _is_global(each.address)]
        for name, found in psutil.net_if_addrs().items()
    }


def _is_global(address: str) -> bool:
    """Whether text is an IP address that needs no interface: hardware addresses are none."""
    try:
        return not ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False


def _card(device: Path) -> str:
    """Return the RDMA device and port behind an interface; empty if there is none."""
    cards = sorted(one.name for one in (device / "device" / "infiniband").glob("*"))
    if not cards:
        return ""
    try:
        port = int((device / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return f"{cards[0]}:{port}"
