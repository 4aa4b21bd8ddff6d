"""Which network interface ranks on several hosts use, from routing tables as Linux writes them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.harness.torchrun import interface
from fsdp_conformance.harness.torchrun.interface import VARIABLES, interface_towards, interface_variables

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"

#: A default route over ens5, the cluster's network over ib0, a docker bridge that is down, and a rejected network.
IPV4 = (
    HEADER
    + "ens5\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    + "ib0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
    + "eth9\t0000000A\t00000000\t0001\t0\t0\t600\t000000FF\t0\t0\t0\n"
    + "docker0\t000011AC\t00000000\t0000\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    + "ens5\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
)

#: fd00:1::/64 over ens6, link-local addresses, and the loopback.
IPV6 = (
    "fd000001000000000000000000000000 40 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000100 00000001 00000000 00000001     ens6\n"
    "fe800000000000000000000000000000 40 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000100 00000001 00000000 00000001     ens7\n"
    "00000000000000000000000000000001 80 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 00000000 00000003 00000000 80200001       lo\n"
)

#: Names and the addresses that they have on this host.
NAMES = {"peer": ["10.1.2.3"], "self": ["127.0.1.1"], "six": ["fd00:1::7"], "both": ["fd00:1::7", "192.168.0.9"]}


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tables of a host, and the names that it knows."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/route").write_text(IPV4)
    (tmp_path / "net/ipv6_route").write_text(IPV6)

    def resolve(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if host not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (address, 0)) for address in NAMES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("host", "expected"),
    [("peer", "ib0"), ("self", "ens5"), ("six", "ens6"), ("both", "ens5"), ("none", "ens5")],
    ids=["the longest prefix and the least metric", "its own name", "IPv6", "IPv4 first", "unknown name"],
)
def test_the_interface_of_the_route(proc: Path, host: str, expected: str) -> None:
    """The route leads to another host, or to the world if this host has the name."""
    assert interface_towards(host, proc) == expected


def test_hosts_without_a_default_route(proc: Path) -> None:
    """The only network is the one; of several, none can be told from its own name."""
    (proc / "net/ipv6_route").write_text("")
    lines = IPV4.splitlines(keepends=True)
    (proc / "net/route").write_text("".join([lines[0], lines[2]]))
    assert interface_towards("self", proc) == "ib0"
    (proc / "net/route").write_text("".join([lines[0], lines[2], lines[5]]))
    assert interface_towards("self", proc) is None
    assert interface_towards("both", proc) == "ens5"


def test_without_routing_tables(tmp_path: Path, proc: Path) -> None:
    """Systems other than Linux have none: gloo and NCCL choose by themselves."""
    assert interface_towards("peer", tmp_path / "nowhere") is None
    assert interface_variables("peer", tmp_path / "nowhere") == {}
    assert interface.network_of_this_process(tmp_path / "nowhere") == ""


def test_what_the_user_has_named_stays(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may name one variable or both."""
    assert interface_variables("peer", proc) == dict.fromkeys(VARIABLES, "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib1")
    assert interface_variables("peer", proc) == {"GLOO_SOCKET_IFNAME": "ib0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    assert interface_variables("peer", proc) == {}


def test_processes_of_one_network() -> None:
    """This one has a name for it, and always the same."""
    assert interface.network_of_this_process() == interface.network_of_this_process() != ""
