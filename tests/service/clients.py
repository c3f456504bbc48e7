"""Clients of a scripted server, and a body that it can send in two goes."""

from contextlib import contextmanager

from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Clock, Retry
from tests.service.scripted import answer


@contextmanager
def client_of(script, **options):
    waits = []
    clock = Clock(sleep=waits.append)
    options = {"retry": Retry(attempts=4, seed=1), "clock": clock, **options}
    client = HttpClient(f"http://127.0.0.1:{script.port}", **options)
    client.waits = waits
    try:
        yield client
    finally:
        client.close()


def get(client, **options):
    return bytes(client.get("/x", limit=1000, **options).body)


def send(client, body=b"update"):
    return client.send("/x", body, token=None, limit=1000, content_type="a/b").status


BODY = bytes(range(100))


def rest(head):
    start = int(head["range"].removeprefix("bytes=").removesuffix("-"))
    return answer(206, BODY[start:], content_range=f"bytes {start}-99/100", etag='"a"')
