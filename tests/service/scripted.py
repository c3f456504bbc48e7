"""A server that answers by script, well or badly."""

import json
import socket
import threading
from contextlib import contextmanager, suppress

HEAD = "HTTP/1.1 {} X\r\ncontent-length: {}\r\n"


def answer(status=200, body=b"", **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (HEAD.format(status, len(body)) + lines + "\r\n").encode() + body


def refusal(status, kind, wrong="refused"):
    facts = {"status": status, "kind": kind, "wrong": wrong, "got": "1", "allowed": "2", "fix": "x"}
    return answer(status, json.dumps({"error": facts}).encode())


class Script:
    """A server that gives one answer after the other, and remembers what it was asked.

    An answer is bytes; None hangs up; a callable gets the head of the request. An answer that is
    shorter than its content-length is cut by closing the connection.
    """

    def __init__(self, *answers):
        self.answers, self.asked, self.connections = list(answers), [], 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection, connection.makefile("rb") as reader, suppress(OSError):
                while self._exchange(connection, reader):
                    pass

    def _exchange(self, connection, reader):
        """Whether the connection can be used again."""
        head = {}
        first = reader.readline()
        while (line := reader.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            head[name.lower()] = value.strip()
        if not first:
            return False
        body = reader.read(int(head.get("content-length", 0)))
        self.asked.append((first.decode().split()[0], head, body))
        given = self.answers.pop(0) if self.answers else None
        if callable(given):
            given = given(head)
        if given is None:
            return False
        connection.sendall(given)
        top, _, sent = given.partition(b"\r\n\r\n")
        length = [x for x in top.lower().split(b"\r\n") if x.startswith(b"content-length")]
        return bool(length) and len(sent) == int(length[0].partition(b":")[2])


@contextmanager
def scripted(*answers):
    script = Script(*answers)
    script.thread.start()
    try:
        yield script
    finally:
        with suppress(OSError):
            script.listener.shutdown(socket.SHUT_RDWR)
        script.listener.close()
