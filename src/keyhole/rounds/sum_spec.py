"""PopularSpec, AggregationSpec, PrivacySpec and AsyncSpec: what private queries ask for, when and
how updates are added up, and what is promised; parts of `RunSpec`.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from keyhole.identity import Ref
from keyhole.primitives.report import METRIC_NAME
from keyhole.rounds.fields import Count, CountOrNone, NotNegative, Positive, Record, said


class PopularSpec(Record, frozen=True, kw_only=True):
    """Popular keys, of which private queries ask a table of their own."""

    keys: Annotated[
        dict[str, str],
        said(
            "Private retrieval: popular keys, of which a small table holds the slices: SPACE=N for "
            "the first N, SPACE=0-99+250 for some, SPACE=@FILE for those in a file. Other keys of "
            "a client are dropped and counted, but for the rest of --popular-share. Everybody sees "
            "which keys are popular: name them from public counts.",
            "--popular",
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it
    share: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        said(
            "With --popular: share of a client's keys that the small table is asked for; the whole "
            "table is asked for the rest, and for nothing where it is 1.",
            "--popular-share",
        ),
    ] = 1.0


class AggregationSpec(Record, frozen=True, kw_only=True):
    """How updates are added up."""

    name: Annotated[
        Ref | None,
        said(
            "How updates are added up: in the clear; dense at the client; in the clear without the "
            "largest and smallest numbers of each coordinate; by one server that sees only sums, "
            "dense or as a sketch; by two servers that see nothing.",
            "--aggregation",
        ),
    ] = None
    value_clip: Annotated[
        Positive,
        said(
            "Clip each coordinate of an update to [-C, C] before secure aggregation.",
            "--value-clip",
        ),
    ] = 16.0
    ring_bits: Annotated[
        Literal[16, 32],
        said(
            "Bits of the ring of secure sums: 16 halves what is sent, and rounds to steps 65,536 "
            "times as coarse.",
            "--ring-bits",
        ),
    ] = 32
    signed: Annotated[
        bool,
        said(
            "Secure sums with one server: clients sign the list of those that remain, so that a "
            "server that shows them different lists is caught. One more message each way.",
            "--signed",
        ),
    ] = False
    min_clients_per_key: Annotated[
        Annotated[int, Meta(ge=0)],
        said(
            "Secure sums with two servers: drop the rows of keys that fewer clients sent, before "
            "anything is opened; both servers learn how many sent each key. 0 drops none.",
            "--min-clients-per-key",
        ),
    ] = 0
    count_noise: Annotated[
        Annotated[float, Meta(ge=0)],
        said(
            "With --min-clients-per-key: standard deviation of the noise that each server adds to "
            "its share of the counts, in clients.",
            "--count-noise",
        ),
    ] = 0.0
    metrics: Annotated[
        dict[Annotated[str, Meta(pattern=METRIC_NAME)], Positive],
        said(
            "Secure sums: add up these metrics of clients too, each with the max value that "
            "counts, so that their weighted means are recorded; nobody sees those of one client.",
            "--sum-metrics",
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it
    max_update_norm: Annotated[
        Positive | None,
        said(
            "Max L2 norm of a client's whole update: devices clip to it, and where updates arrive "
            "in the clear one above it is refused. Secure sums have the word of devices alone.",
            "--max-update-norm",
        ),
    ] = None
    above_norm: Annotated[
        Literal["refuse", "clip"],
        said(
            "With --max-update-norm: what is done with an update above it that arrives in the "
            "clear.",
            "--above-norm",
        ),
    ] = "refuse"
    trim: Annotated[
        Annotated[float, Meta(ge=0, lt=0.5)] | None,
        said(
            "Trimmed mean: share of the values of each coordinate that is left out at each end, "
            "rounded up.",
            "--trim",
        ),
    ] = None
    untouched: Annotated[
        Literal["left-out", "zeros"] | None,
        said(
            "Trimmed mean and median: leave out clients that did not choose a key, or count them "
            "as zeros. With zeros, keys that few clients choose do not move.",
            "--untouched",
        ),
    ] = None
    norm_alarm: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        said(
            "Report, and count in records, how many updates in the clear are longer than X "
            "times the median norm; nothing else changes.",
            "--norm-alarm",
        ),
    ] = None


class PrivacySpec(Record, frozen=True, kw_only=True):
    """Differential privacy of a client."""

    noise: Annotated[NotNegative, said("Noise multiplier: in units of --dp-clip.", "--dp-noise")]
    clip: Annotated[Positive, said("L2 clipping norm of a client's update.", "--dp-clip")]
    delta: Annotated[
        Annotated[float, Meta(gt=0, lt=1)],
        said("Delta, for which epsilon is stated.", "--dp-delta"),
    ] = 1e-6
    budget: Annotated[
        Positive | None,
        said("Max epsilon; a round that would spend more does not start.", "--dp-budget"),
    ] = None
    kind: Annotated[
        Literal["all-rows", "thresholded", "correlated"],
        said(
            "Noise on all rows, on rows that enough clients chose, or correlated over rounds.",
            "--dp-kind",
        ),
    ] = "all-rows"
    threshold: Annotated[
        float,
        said(
            "With --dp-kind thresholded: rows whose noisy count of clients is lower are dropped.",
            "--dp-threshold",
        ),
    ] = 10.0
    rounds: Annotated[
        CountOrNone, said("Rounds that correlated noise is planned for; 0 for other kinds.")
    ] = 0
    bands: Annotated[
        CountOrNone,
        said(
            "With --dp-kind correlated: number of bands of the noise-correlation matrix, that is "
            "of rounds over which noise is correlated; 0 for all previous rounds.",
            "--dp-bands",
        ),
    ] = 0


class AsyncSpec(Record, frozen=True, kw_only=True):
    """Asynchronous rounds."""

    concurrency: Annotated[
        Count,
        said(
            "Asynchronous rounds: N clients train at any time, and the server steps whenever "
            "the updates of a cohort have arrived, however old. In process a client takes a "
            "random time, exponential; devices take their own.",
            "--concurrency",
        ),
    ]
    max_staleness: Annotated[
        CountOrNone,
        said(
            "With --concurrency: leave out updates that are more than N server steps old.",
            "--max-staleness",
        ),
    ] = 20
