"""Private information retrieval as a delivery, in process: the same messages as on a wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from keyhole.arrays import ClientId, KeyArray
from keyhole.delivery.base import PARTIES, PIR_SCHEMES, Learned
from keyhole.delivery.exchange import PrivateTable, Tally
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import Database, Scheme, Terms, name_of_round
from keyhole.delivery.pir.messages import Answerer, Asker, Retrieved

_MODULES: Mapping[Scheme, ModuleType] = {
    "two-server": two_server,
    "one-server": one_server,
}
_MAX_HELD = 512 << 20  # bytes of messages of all clients that are answered together


@dataclass(frozen=True)
class Pir:
    """Retrieval of slices that hides from each server which ones.

    Args:
        scheme: with two servers that do not collude, or with one.
    """

    scheme: Scheme = "two-server"

    @property
    def seen_by(self) -> Mapping[str, Learned]:
        """Each server learns who takes part; how many keys are asked for is a public maximum."""
        (way,) = (way for way, scheme in PIR_SCHEMES.items() if scheme == self.scheme)
        return PARTIES[way].seen_by

    def retrieve(
        self, table: PrivateTable, wanted: Mapping[ClientId, KeyArray], tally: Tally
    ) -> Mapping[ClientId, Retrieved]:
        """Clients ask; each server answers many of them in one pass over its table."""
        asker, servers, hint_bytes = self._open(table)
        found: dict[ClientId, Retrieved] = {}
        for some in _groups(list(wanted), asker.terms):
            questions = {client: asker.ask(wanted[client]) for client in some}
            sent = {client: question.messages() for client, question in questions.items()}
            replies = [
                server.answer_many([messages[place] for messages in sent.values()])
                for place, server in enumerate(servers)
            ]
            for at, (client, question) in enumerate(questions.items()):
                mine = [answers[at] for answers in replies]
                tally.add(client, sum(map(len, mine)) + hint_bytes, sum(map(len, sent[client])))
                found[client] = question.open(mine)
        return found

    def _open(self, table: PrivateTable) -> tuple[Asker, list[Answerer], int]:
        """A client's side, the servers, and the bytes of a hint that every client fetches."""
        database = Database.of(name_of_round(table.round_id), table.records)
        if self.scheme == "one-server":
            server = one_server.OneServer.of(database, table.max_keys)
            asker = one_server.OneServerAsker(server.terms, server.hint)
            return asker, [server], len(server.hint)
        terms = two_server.terms_of(database, table.max_keys)
        both = [two_server.TwoServer(database, terms, place) for place in (0, 1)]
        return two_server.TwoServerAsker(terms), [*both], 0


def _groups(clients: Sequence[ClientId], terms: Terms) -> Iterator[Sequence[ClientId]]:
    """Clients whose messages fit into memory together; one at the least."""
    scheme = _MODULES[terms.scheme]
    size = max(1, _MAX_HELD // (2 * (scheme.query_bytes(terms) + scheme.reply_bytes(terms))))
    return (clients[start : start + size] for start in range(0, len(clients), size))
