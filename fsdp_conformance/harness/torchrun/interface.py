"""
The network interface by which a host reaches the others of a torchrun job.

gloo listens at the address of the host's own name, which many systems resolve to a loopback address; then ranks on
other hosts cannot connect. The interface of the route to torchrun's store is one that the hosts have in common. Linux
lists its routes in /proc; elsewhere nothing is found, and gloo and NCCL choose by themselves.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The variables that gloo and NCCL read.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_PROC = Path("/proc")

#: Flags of a route: it is up; it rejects (linux/route.h).
_UP, _REJECT = 0x1, 0x200

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Route:
    """A line of a routing table."""

    network: Network
    interface: str
    metric: int


def network_of_this_process(proc: Path = _PROC) -> str:
    """A name that two processes share if and only if they can talk over the loopback; "" if that is unknown."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat(proc / 'self/ns/net').st_ino}"
    except OSError:
        return ""


def interface_variables(host: str, proc: Path = _PROC) -> dict[str, str]:
    """Variables that make gloo and NCCL use the interface towards `host`, except those that are set already."""
    unset = [name for name in VARIABLES if not os.environ.get(name)]
    interface = interface_towards(host, proc) if unset else None
    return dict.fromkeys(unset, interface) if interface else {}


def interface_towards(host: str, proc: Path = _PROC) -> str | None:
    """
    The interface of the route to a host, or to the rest of the world if this host itself has that name.

    None if there is no such route.
    """
    routes = list(_routes(proc))
    # A host's own name is often a loopback address to itself, and never to the others.
    addresses = [address for address in _addresses(host) if not address.is_loopback]
    for address in addresses or [ipaddress.IPv4Address("0.0.0.0"), ipaddress.IPv6Address("::")]:  # noqa: S104
        matching = [route for route in routes if address in route.network]
        if matching:
            return min(matching, key=lambda route: (-route.network.prefixlen, route.metric)).interface
    # A cluster's private network may have no default route.
    others = {route.interface for route in routes}
    return others.pop() if not addresses and len(others) == 1 else None


def _addresses(host: str) -> list[Address]:
    """The addresses of a host, IPv4 first; none if it is not known."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries)
    return sorted(map(ipaddress.ip_address, addresses), key=lambda address: address.version)


def _routes(proc: Path) -> Iterator[Route]:
    """The routes of this network namespace that lead somewhere, without those over the loopback."""
    for line in _lines(proc / "net/route")[1:]:
        interface, destination, _, flags, _, _, metric, mask = line.split()[:8]
        if _leads_somewhere(int(flags, 16), interface):
            network = ipaddress.IPv4Network((_ipv4(destination), str(_ipv4(mask))))
            yield Route(network, interface, int(metric))
    for line in _lines(proc / "net/ipv6_route"):
        destination, length, *_, metric, _, _, flags, interface = line.split()
        network6 = ipaddress.IPv6Network((int(destination, 16), int(length, 16)))
        multicast = network6.is_multicast or network6.is_link_local
        if _leads_somewhere(int(flags, 16), interface) and not multicast:
            yield Route(network6, interface, int(metric, 16))


def _leads_somewhere(flags: int, interface: str) -> bool:
    return bool(flags & _UP) and not flags & _REJECT and interface != "lo"


def _ipv4(text: str) -> ipaddress.IPv4Address:
    # The kernel prints the address as a number of this processor; its bytes in memory are in network order.
    return ipaddress.IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
