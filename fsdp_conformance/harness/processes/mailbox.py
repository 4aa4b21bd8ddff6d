"""
Messages between the controller and a rank, over the pipe that torch's harness passes to `_run`.

Both sides write whole messages with `Connection.send_bytes`. The controller reads them piece by piece: if a rank stops
in the middle of a message, `Connection.recv` would block the controller.
"""

from __future__ import annotations

import json
import os
import struct
from multiprocessing.connection import Connection
from typing import Any

#: The most that one read takes from the pipe.
_CHUNK = 1 << 20


class Mailbox:
    """The controller's end of one rank's pipe."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.closed = False
        self._buffer = bytearray()

    def receive(self) -> list[bytes]:
        """The messages that one read completes. Blocks unless the connection is ready."""
        try:
            data = os.read(self.connection.fileno(), _CHUNK)
        except OSError:  # the rank's end of the pipe broke
            data = b""
        if not data:
            self.closed = True
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def drain(self) -> list[bytes]:
        """All messages of a rank that has ended. Does not block."""
        messages: list[bytes] = []
        while not self.closed and self.connection.poll(0):
            messages += self.receive()
        return messages

    def send(self, message: dict[str, Any]) -> None:
        """Send one message, which a rank that has ended does not receive."""
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            self.closed = True

    def _next(self) -> bytes | None:
        """The first complete message, in multiprocessing.connection's framing: a length, or -1 and a longer length."""
        header = 4
        if len(self._buffer) < header:
            return None
        (size,) = struct.unpack_from("!i", self._buffer)
        if size == -1:
            header = 12
            if len(self._buffer) < header:
                return None
            (size,) = struct.unpack_from("!Q", self._buffer, 4)
        if len(self._buffer) < header + size:
            return None
        message = bytes(self._buffer[header : header + size])
        del self._buffer[: header + size]
        return message
