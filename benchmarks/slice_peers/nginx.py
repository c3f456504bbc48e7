"""nginx over plain files: whole answers, the packed table in many ranges, one file per slice."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from slice_peers.load import http_length
from slice_peers.processes import free_port, serving

INSTALL = "apt install nginx"
MAX_WHOLE = 256  # files that hold whole answers: ten times the cache of the processor at 2 MB each
MAX_SLICES = 10_000  # files that hold one slice: as many as nginx can keep open here

_CONFIG = """
daemon off;
master_process off;
worker_processes 1;
worker_rlimit_nofile 20000;
error_log stderr error;
pid {root}/nginx.pid;
events {{ worker_connections 7000; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_requests 1000000;
  client_body_temp_path {root}/body;
  proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi;
  scgi_temp_path {root}/scgi;
  large_client_header_buffers 8 64k;
  max_ranges 2000;
  open_file_cache max=12000 inactive=1h;
  open_file_cache_valid 1h;
  types {{}}
  default_type application/octet-stream;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    root {root};
    location /packed {{ sendfile off; output_buffers 4 512k; }}  # many ranges go faster so
    location /put {{ dav_methods PUT; }}
  }}
}}
"""


def find() -> str | None:
    """The program, where it is installed."""
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


@contextmanager
def nginx(root: Path) -> Iterator[tuple[int, int]]:
    """Serves a directory; gives port and process."""
    port, program = free_port(), find()
    assert program is not None
    config = root / "nginx.conf"
    config.write_text(_CONFIG.format(root=root, port=port))
    with serving([program, "-e", "stderr", "-p", str(root), "-c", str(config)], port) as pid:
        yield port, pid


def answer_length(head: bytes) -> int | None:
    """The length of a whole answer with this beginning; of one that has stored a file, too."""
    end = head.find(b"\r\n\r\n")
    if end >= 0 and head.split(b" ", 2)[1] in (b"201", b"204"):
        length = re.search(rb"content-length: *([0-9]+)", head[:end].lower())
        return end + 4 + (int(length[1]) if length else 0)
    return http_length(head)


def write_whole(root: Path, table: np.ndarray, keys_per_client: int) -> list[bytes]:
    """Files of as many slices as a client asks for; returns requests for them."""
    requests = whole_requests(len(table), keys_per_client)
    directory = root / f"whole-{keys_per_client}"
    directory.mkdir()
    for place in range(len(requests)):
        rows = table[place * keys_per_client : (place + 1) * keys_per_client]
        (directory / str(place)).write_bytes(rows.tobytes())
    return requests


def whole_requests(num_keys: int, keys_per_client: int) -> list[bytes]:
    """Requests for the files that `write_whole` makes: all slices, or many of them."""
    count = max(1, min(MAX_WHOLE, num_keys // keys_per_client))
    return [_get(f"/whole-{keys_per_client}/{place}") for place in range(count)]


def write_slices(root: Path, table: np.ndarray) -> Path:
    """One file for each slice, of the first ones where there are too many."""
    directory = root / "slices"
    directory.mkdir()
    for key, row in enumerate(table[:MAX_SLICES]):
        (directory / str(key)).write_bytes(row.tobytes())
    return directory


def get_each(directory: Path, keys: np.ndarray) -> bytes:
    """One request for each slice, sent without waiting in between."""
    return b"".join(_get(f"/{directory.name}/{key}") for key in (keys % MAX_SLICES).tolist())


def get_ranges(keys: np.ndarray, length: int) -> bytes:
    """One request for as many ranges of the packed table as there are keys."""
    return _get("/packed/rows", f"Range: bytes={_ranges(keys.tolist(), length)}\r\n")


def _ranges(keys: Sequence[int], length: int) -> str:
    return ",".join(f"{key * length}-{(key + 1) * length - 1}" for key in keys)


def _get(path: str, fields: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n".encode()
