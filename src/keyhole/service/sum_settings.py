"""Sets what an aggregator allows, whatever a trainer asks for."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.aggregation.two_servers.messages import own_bytes, public_bytes
from keyhole.aggregation.two_servers.params import SumParams
from keyhole.errors import BusyError, ConflictError, InputError, TooLargeError
from keyhole.service.access import check_device_name
from keyhole.wire.sums import SumOpening


@dataclass(frozen=True)
class AggregatorSettings:
    """What an aggregator allows.

    Args:
        party: 0 or 1: which of the two this one is.
        min_clients: the operator's own minimum: a sum whose terms allow fewer is not opened.
        max_sums: that are open, being added up or not yet forgotten, of all trainers.
        max_table: bytes of a server's share of one sum. Adding up takes as much memory, and some
            256 MB for the messages of a batch; one sum is added up at a time.
        max_upload: bytes of one device's body.
        max_cohort: devices of one sum.

    Raises:
        InputError: a number is out of range.
    """

    party: int
    min_clients: int = 2
    max_sums: int = 4
    max_table: int = 2 << 30
    max_upload: int = 64 << 20
    max_cohort: int = 1 << 20

    def __post_init__(self) -> None:
        limits = self.min_clients, self.max_sums, self.max_table, self.max_upload
        if self.party not in (0, 1) or min(*limits, self.max_cohort) < 1:
            raise InputError(
                "settings of an aggregator that make no sense",
                got=f"party {self.party}, least number {min(*limits, self.max_cohort)}",
                allowed="party 0 or 1, and limits from 1",
                fix="choose other numbers",
            )

    def check(self, opening: SumOpening, terms: SumParams, live: int) -> None:
        """Refuses a sum that this aggregator will not take part in.

        Args:
            opening: as the trainer sent it.
            terms: that it holds.
            live: sums that are here already.

        Raises:
            ConflictError: it is meant for the other aggregator.
            InputError: too small a minimum, or a cohort that cannot be.
            TooLargeError: too large a cohort, table or upload.
            BusyError: too many sums.
        """
        if opening.party != self.party:
            raise ConflictError(
                "this is the other aggregator",
                got=f"a sum for party {opening.party}",
                allowed=f"party {self.party}",
                fix="name the aggregators in the order of their parties",
            )
        if terms.min_clients < self.min_clients:
            raise InputError(
                "a sum of too few clients could be released",
                got=f"at least {terms.min_clients}",
                allowed=f"at least {self.min_clients}, says the operator of this aggregator",
                fix="raise min_clients",
            )
        self._check_cohort(opening, terms)
        self._check_sizes(terms)
        if live >= self.max_sums:
            raise BusyError(
                "too many sums are under way",
                got=live + 1,
                allowed=self.max_sums,
                fix="close and forget older ones",
            )

    def _check_cohort(self, opening: SumOpening, terms: SumParams) -> None:
        names = opening.cohort
        for name in names:
            check_device_name(name)
        limit = min(self.max_cohort, terms.max_clients)
        if len(names) > limit or len(set(names)) != len(names):
            raise TooLargeError(
                "a cohort that cannot be added up",
                got=f"{len(names)} devices, {len(set(names))} of them different",
                allowed=f"{limit} different ones",
                fix="ask fewer, each once",
            )

    def _check_sizes(self, terms: SumParams) -> None:
        upload = upload_bytes_of(terms, self.party)
        if terms.table_bytes > self.max_table or upload > self.max_upload:
            raise TooLargeError(
                "a sum that is too large for this aggregator",
                got=f"{terms.table_bytes} bytes of sums, {upload} of one upload",
                allowed=f"{self.max_table} and {self.max_upload} bytes",
                fix="raise --max-table-mb or --max-body-mb there, or train a smaller model",
            )


def upload_bytes_of(terms: SumParams, party: int) -> int:
    """Of the body that a device sends to one aggregator: its own message, and to the first one the
    public message behind it."""
    return own_bytes(terms, party) + (public_bytes(terms) if party == 0 else 0)
