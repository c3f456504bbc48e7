"""The secure sparse sum with two servers: each holds a share of the sum, and neither an update."""

from __future__ import annotations

from dataclasses import dataclass, field

from keyhole.private.secure_sum.whole_client import WholeShares, share_update
from keyhole.private.secure_sum.whole_messages import Share, whole_upload_bytes
from keyhole.private.secure_sum.whole_server import WholeServer
from keyhole.private.secure_sum.whole_terms import WholeTerms
from keyhole.training.aggregation.contract import Adding, Summed, with_counts, withheld
from keyhole.training.aggregation.rounding import Rounding, derived, name_of_sum
from keyhole.training.aggregation.whole_sums import TWO_SERVERS_SEEN_BY, open_sum, terms_of

__all__ = ["TwoServers"]


@dataclass(frozen=True)
class TwoServers:
    """Point functions with the rows as payload (see `private.secure_sum.whole_client`).

    Hidden from each server: keys and updates, if both do not collude. Clients that drop out need
    nothing: they are in both lists or in none. The servers are those of the service
    (`serving.sums`), driven in one process.

    Args:
        rounding: of updates.
        least_clients: below which neither server releases anything.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
    """

    rounding: Rounding = field(default_factory=Rounding)
    least_clients: int = 2
    noise: float = 0.0

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        seen = with_counts(TWO_SERVERS_SEEN_BY, adding)
        if len(adding.sent) < self.least_clients:  # the servers would refuse, after all the work
            return withheld(len(adding.sent), self.least_clients, seen)
        terms = self._terms(adding)
        sent = {
            str(one.client): share_update(terms, self.rounding.rows(adding, one))
            for one in adding.sent
        }
        opened = open_sum(terms, _shares(terms, adding, sent), adding.over)
        return Summed(
            opened.rows,
            {one.client: whole_upload_bytes(terms) for one in adding.sent},
            opened.counts if adding.with_counts else None,
            unplaced_keys=sum(one.unplaced for one in sent.values()),
            seen_by=seen,
        )

    def _terms(self, adding: Adding) -> WholeTerms:
        return terms_of(
            adding.layout,
            adding.keys_per_client,
            self.rounding,
            name=name_of_sum(adding),
            asked=len(adding.contributions),
            least_clients=self.least_clients,
            with_counts=adding.needs_counts,
            noise=self.noise,
        )


def _shares(terms: WholeTerms, adding: Adding, sent: dict[str, WholeShares]) -> tuple[Share, Share]:
    """What both servers give out."""
    cohort = [str(one.client) for one in adding.contributions]
    one, other = servers = WholeServer(terms, 0, cohort), WholeServer(terms, 1, cohort)
    for server in servers:
        for name, shares in sent.items():
            server.accept(name, shares.to[server.party])
    lists = one.close(), other.close()
    agreed = one.reduce(lists[1]), other.reduce(lists[0])
    one.agree(agreed[1])
    other.agree(agreed[0])
    for server in servers:
        for name, shares in sent.items():
            server.add(name, shares.public, shares.to[server.party])
    return _share(one, adding), _share(other, adding)


def _share(server: WholeServer, adding: Adding) -> Share:
    """With noise that derives from the seed of the simulation."""
    parts = range(len(adding.layout.parts))
    return server.share([derived(b"noise", adding.place, part, server.party) for part in parts])
