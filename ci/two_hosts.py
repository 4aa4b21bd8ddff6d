"""
Two hosts on one machine: network namespaces with nothing in common but a link, which can delay and lose packets.

    with TwoHosts(delay_ms=2, loss=0.01) as hosts:
        subprocess.run(hosts.words(0, ["ping", "-c", "1", hosts.addresses[1]]))

Each has an interface `link0`, an address on it, and no other network; the name of the machine leads each host to its
own loopback, as on many real ones. Processes share the file system. Needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN.

A plain link is a veth pair. One that delays or loses is a process of ours between two tun devices, so that no kernel
module for traffic control is needed: each packet waits for `delay_ms`, and is lost with probability `loss`, both ways.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from fsdp_conformance.errors import EnvironmentUnavailable

ADDRESSES = ("10.213.0.1", "10.213.0.2")
INTERFACE = "link0"

#: How long a command of `ip`, or the relay's start, may take.
_PATIENCE_S = 20.0

#: linux/if_tun.h and linux/sched.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000

_MTU = 9000

_READY = b"ready\n"


class TwoHosts:
    """Use it as a context manager. Raises EnvironmentUnavailable on entry if this machine does not allow it."""

    addresses = ADDRESSES

    def __init__(self, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        self.delay_ms = delay_ms
        self.loss = loss
        self.names = tuple(f"fsdp-conformance-{os.getpid()}-{host}" for host in range(2))
        self._resources = ExitStack()

    def __enter__(self) -> TwoHosts:
        with ExitStack() as resources:
            for name in self.names:
                _ip("netns", "add", name)
                resources.callback(_remove, name)
            if self.delay_ms or self.loss:
                self._start_relay(resources)
            else:
                first, second = self.names
                _ip(
                    "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second
                )
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def words(self, host: int, command: Sequence[str]) -> list[str]:
        """The command on that host, 0 or 1."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def _start_relay(self, resources: ExitStack) -> None:
        words = [sys.executable, __file__, *self.names, "--delay-ms", str(self.delay_ms), "--loss", str(self.loss)]
        relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        resources.callback(_end, relay)
        assert relay.stdout is not None, "the relay is started with a pipe"
        ready, _, _ = select.select([relay.stdout], [], [], _PATIENCE_S)
        if not ready or relay.stdout.readline() != _READY:
            relay.kill()
            _, errors = relay.communicate()
            raise EnvironmentUnavailable(f"no link between two network namespaces: {errors.decode().strip()[-500:]}")


def _ip(*words: str) -> None:
    """Run `ip`. Raises EnvironmentUnavailable if it is absent or fails."""
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    except FileNotFoundError as error:
        raise EnvironmentUnavailable("no network namespaces: the command `ip` (iproute2) is not on the path") from error
    except subprocess.CalledProcessError as error:
        raise EnvironmentUnavailable(
            f"no network namespaces: `ip {' '.join(words)}` says {error.stderr.strip()!r}. It needs root."
        ) from error


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=_PATIENCE_S)


def _end(relay: subprocess.Popen[bytes]) -> None:
    """The relay ends with its input."""
    if relay.poll() is None:
        relay.kill()
    relay.communicate()


def open_tun(namespace: str) -> int:
    """A tun device in that namespace, which this process enters. It goes away with the descriptor."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def relay(ends: Sequence[int], *, delay_s: float, loss: float, seed: int = 0) -> None:
    """Carry packets between two descriptors until the standard input ends."""
    draw = random.Random(seed)
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, *ends], [], [], left)
        if 0 in readable and not os.read(0, 1):
            return
        now = time.monotonic()
        for source, target in (ends, tuple(reversed(ends))):
            if source in readable:
                packet = os.read(source, _MTU + 100)
                number += 1
                if draw.random() >= loss:
                    heapq.heappush(waiting, (now + delay_s, number, target, packet))
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(target, packet)
            except OSError:  # the link is full or down: a real one would lose it, too
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description="Carry packets between two network namespaces.")
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    args = parser.parse_args()
    ends = [open_tun(name) for name in args.namespaces]
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    relay(ends, delay_s=args.delay_ms / 1000, loss=args.loss)


if __name__ == "__main__":
    main()
