"""Machine: how fast one core does what deliveries are made of.

The speeds below are of one core of a 2-core machine of our own (2.8 GHz, AVX-512), and each names
where it comes from. `calibration.calibrate` measures another machine.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """Speeds of one core; those without a unit are bytes a second.

    Args:
        gather: copying slices of random keys. DESIGN, section 4: 100 MB in 9.3 ms on two cores.
        hash: BLAKE2b, of which every slice carries a tag. Measured with `calibrate`.
        aes: AES-128 over many seeds at once. DESIGN's notes, B0: 10.9 GB/s in pieces that stay in
            the cache.
        scan: XOR of the rows of a table that one query names: of half of them, so that this is
            above what memory gives. B1: 13.7 GB/s.
        scan_many: the same for `pass_queries` queries or more in one pass. B1: 43 to 47 GB/s.
        scan_buckets: the same for one query of all buckets; rows lie scattered, and each is in
            three buckets. B3: 600 MB in 46 ms.
        lwe_answer: a product of table and query, for one query. B2: 8.6 GB/s.
        lwe_answer_many: for `pass_queries` or more. B2: 13 GB/s.
        lwe_hint: a product of the table and the public matrix, each round. B2: 200 MB in 16.8 s.
        lwe_client: multiplications of numbers of 32 bits a second at a client. B2: 1e5 x 1,024 in
            176 ms.
        enclave_scan: reading all rows for one key under a mask.
        xor: of replies at a client.
        expand_points: points a second that a server expands shares of queries to.
        share_seconds: for making the shares of one key for two servers. B3: 4.6 ms for 1,300.
        seal_seconds: for sealing a request and opening its answer, at a client. B7: 167 + 17 us.
        open_seconds: for opening a request and sealing its answer, at a gateway. B7: 77 + 21 us.
        forward_seconds: for passing on a request and its answer, at a relay.
        quote_seconds: for checking what an enclave shows. B8: 10.8 ms.
        pass_queries: queries that are answered in one pass over a table.
    """

    gather: float = 5.4e9
    hash: float = 0.9e9
    aes: float = 10.9e9
    scan: float = 13.7e9
    scan_many: float = 45e9
    scan_buckets: float = 13e9
    lwe_answer: float = 8.6e9
    lwe_answer_many: float = 13e9
    lwe_hint: float = 11.9e6
    lwe_client: float = 0.58e9
    enclave_scan: float = 10e9
    xor: float = 5e9
    expand_points: float = 20e9
    share_seconds: float = 3.5e-6
    seal_seconds: float = 184e-6
    open_seconds: float = 98e-6
    forward_seconds: float = 100e-6
    quote_seconds: float = 10.8e-3
    pass_queries: int = 32

    def scan_seconds(self, table_bytes: float, queries: int) -> float:
        """For answering whole-table queries, many in a pass."""
        return self._passes(table_bytes, queries, self.scan, self.scan_many)

    def lwe_seconds(self, table_bytes: float, queries: int) -> float:
        """For answering lattice queries, many in a pass."""
        return self._passes(table_bytes, queries, self.lwe_answer, self.lwe_answer_many)

    def _passes(self, table_bytes: float, queries: int, one: float, many: float) -> float:
        """A pass costs reading the table once, and something for each query.

        Solved so that one query runs at speed `one`, and passes of `pass_queries` at `many`.
        """
        most = self.pass_queries
        each = (most / many - 1 / one) / (most - 1)
        once = 1 / one - each
        return table_bytes * (-(-queries // most) * once + queries * each)
