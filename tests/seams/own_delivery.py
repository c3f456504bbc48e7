"""A private delivery of one's own: every reply is the whole table, masked."""

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from keyhole.delivery import base, exchange
from keyhole.errors import MalformedError

LEAKS = {"own server": base.WHO_TAKES_PART}
ABOUT = base.DeliveryAbout(
    name="own", title="own", leaks=LEAKS, rests_on="Nothing.", is_private=True, route="queries"
)


@dataclass(frozen=True)
class WholeTable:
    mask: int = 0
    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    about = ABOUT

    def for_run(self, keys_per_client, *, allow_simulation=False):
        return replace(self, keys_per_client=keys_per_client)

    def price(self, load, speeds):
        return base.Price(ABOUT, load.table_bytes, 1, {"own server": 1.0}, 0.1, 0, load.num_keys)

    def deliver(self, state, keys):
        return exchange.deliver_by_queries(self, self.keys_per_client, state, keys)

    def open(self, table):
        facts = [each.hex() if isinstance(each, bytes) else each for each in astuple(table.public)]
        return (WholeServer(json.dumps(facts).encode(), table.rows() ^ np.uint8(self.mask)),)

    def client(self, params, hint=b""):
        return WholeClient(self.read_params(params).row_bytes, self.mask, [])

    def read_params(self, params):
        one, two, three, *sizes = json.loads(params)
        digests = bytes.fromhex(one), bytes.fromhex(two), bytes.fromhex(three)
        return base.PublicTable(*digests, *sizes)

    def lengths(self, params):
        return base.Lengths(1, int(np.prod(json.loads(params)[3:5])))

    def held_bytes(self, num_keys, row_bytes, max_keys):
        return num_keys * row_bytes


class WholeServer(NamedTuple):
    params: bytes
    rows: np.ndarray
    hint: bytes = b""

    def check(self, query):
        if query != b"?":
            raise MalformedError(f"no query: got {len(query)} bytes; expected ?; ask anew")

    def answer(self, queries):
        return [self.rows.tobytes() for query in queries if not self.check(query)]


class WholeClient(NamedTuple):
    row_bytes: int
    mask: int
    keys: list[int]

    def query(self, keys, prg=None):
        return self._replace(keys=list(keys))

    def messages(self):
        return (b"?",)

    def decode(self, replies):
        rows = np.frombuffer(replies[0], np.uint8).reshape(-1, self.row_bytes)
        return base.Retrieved.whole(rows[self.keys] ^ np.uint8(self.mask))


PLAIN, MASKED = WholeTable(), WholeTable(mask=255)
