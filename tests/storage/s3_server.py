"""A real S3 server in a process of its own, and a connection to it that can break."""

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def s3_server() -> Iterator[int]:
    """Serves on the loopback interface until the block ends; yields the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield int(found[1])
                return
        raise AssertionError("the S3 server did not start")
    finally:
        process.kill()
        process.wait()


class Line:
    """A connection to a server that can break, or hang, while a certain object is written.

    Attributes:
        port: where it listens on the loopback interface.
        puts: paths of the objects that were to be written, in order.
        cut: part of the path of objects whose writing breaks, after ``cut_after`` bytes at most, as
            often as ``cuts`` says.
        hang: part of the path of objects whose writing hangs.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.puts: list[str] = []
        self.cut, self.cuts, self.cut_after, self.hang = "", 0, 300, ""
        self.hanging = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for arguments in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._carry, args=arguments, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        left = None
        with suppress(OSError):
            while data := source.recv(1 << 16):
                for path in re.findall(rb"PUT (/\S+) HTTP", data) if is_request else ():
                    if self._is_cut(path.decode()):
                        left = self.cut_after
                if left is None:
                    sink.sendall(data)
                    continue
                sink.sendall(data[:left])
                left -= len(data)
                if left <= 0:
                    _reset(source)
                    _reset(sink)
                    return
            sink.shutdown(socket.SHUT_WR)

    def _is_cut(self, path: str) -> bool:
        self.puts.append(path)
        if self.hang and self.hang in path:
            self.hanging.set()
            time.sleep(60)
        is_cut = bool(self.cut) and self.cut in path and self.cuts > 0
        self.cuts -= is_cut
        return is_cut


def _reset(end: socket.socket) -> None:
    """Ends a connection at once: the other side gets ECONNRESET."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.shutdown(socket.SHUT_RDWR)
    end.close()
