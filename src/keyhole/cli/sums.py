"""Reads the options of sums: the two aggregators that make one, its ring, and its privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.cli.options import (
    EXISTING_FILE,
    FILE,
    PLACE,
    NameOr,
    NumberRange,
    in_group,
    options_of,
    refuse,
)
from keyhole.cli.token import read_token, refuse_token
from keyhole.logs import say

if TYPE_CHECKING:
    from keyhole.device.device import Device
    from keyhole.device.take_part import Send
    from keyhole.front.devices import Aggregators
    from keyhole.rounds.spec import RunSpec


_WITH_TWO = "goes with --aggregators"


def _pair(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Two values with a comma between them; none if there are none."""
    found = tuple(text.split(",")) if text else ()
    if found and (len(found) != 2 or not all(found)):
        raise click.BadParameter("two with a comma between them, the first party's first")
    return found


def shared_names() -> tuple[str, ...]:
    """Returns the sum that two aggregators make of shares."""
    return aggregation_names(lambda about: about.is_shared)


aggregator_options = options_of(
    in_group(
        PLACE,
        "--aggregators",
        callback=_pair,
        metavar="URL#KEY,URL#KEY",
        help="Updates go as shares to these two aggregators, party 0 first: neither learns one. A "
        "device seals them to the key of each: hex digits or a file, seal.pub of the aggregator.",
    ),
    in_group(
        PLACE,
        "--aggregator-tokens",
        callback=_pair,
        metavar="FILE,FILE",
        help="Tokens to show there, from their operators.",
    ),
)
trainer_sum_options = options_of(
    aggregator_options,
    in_group(
        PLACE,
        "--aggregator-ca",
        type=EXISTING_FILE,
        help="PEM file of the authorities to trust there, instead of the system's.",
    ),
    in_group(
        PLACE,
        "--min-clients",
        type=click.IntRange(2),
        help="With --aggregators: a sum of fewer is not released.",
        show_default="two thirds of the cohort; 2 with noise",
    ),
    in_group(
        PLACE,
        "--aggregators-insecure",
        is_flag=True,
        help="Speak plain http to aggregators beyond this machine.",
    ),
)
device_sum_options = options_of(
    aggregator_options,
    in_group(
        PLACE,
        "--aggregation",
        type=NameOr(shared_names),
        help="With --aggregators: the sum that they make.",
    ),
    in_group(
        PLACE,
        "--min-clients",
        type=click.IntRange(1),
        help="With --aggregators: take part in no sum that may be released with fewer.",
        show_default="2",
    ),
    in_group(
        PLACE,
        "--min-noise",
        type=NumberRange(0),
        help="With --aggregators: take part in no sum to which each of them adds less noise, in "
        "units of the L2 clipping norm of updates.",
        show_default="0",
    ),
    in_group(
        PLACE,
        "--min-clients-per-key",
        type=click.IntRange(1),
        help="With --aggregators: take part in no sum that opens rows which fewer clients sent.",
        show_default="all rows",
    ),
    in_group(
        PLACE,
        "--ledger",
        type=FILE,
        help="With --aggregators: note here what sums spend of this device's privacy, run after "
        "run; `keyhole privacy` shows it.",
        show_default="$XDG_STATE_HOME/keyhole/ledger, or ~/.local/state/keyhole/ledger",
    ),
    in_group(
        PLACE,
        "--max-epsilon",
        type=NumberRange(0, min_open=True),
        help="With --aggregators: take part in no sum beyond this epsilon, over all runs that the "
        "ledger knows.",
        show_default="no bound",
    ),
)


def check_aggregator_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `keyhole train`, with the sum that aggregators make."""
    if not options["aggregators"]:
        refuse(options, ("aggregator_tokens", "aggregator_ca", "min_clients"), _WITH_TWO)
        return dict(options)
    if not options["devices"] or not options["aggregator_tokens"]:
        raise click.UsageError("--aggregators goes with --devices and --aggregator-tokens")
    (shared,) = shared_names()
    name = options["aggregation"] or shared
    if name != shared and ":" not in name:
        raise click.UsageError(f"two aggregators make {shared}, or your own module:NAME")
    return {**options, "aggregation": name}


def aggregators_of(options: Mapping[str, Any]) -> Aggregators | None:
    """Returns the two aggregators of a run; None where updates arrive in the clear."""
    from keyhole.front.devices import Aggregators

    if not options["aggregators"]:
        return None
    first, second = map(Path, options["aggregator_tokens"])
    for file in (first, second):
        refuse_token(file, "aggregator")
    return Aggregators(
        options["aggregators"],
        (read_token(first), read_token(second)),
        options["aggregator_ca"],
        options["min_clients"] or 0,
        options["aggregators_insecure"],
    )


def send_of(options: Mapping[str, Any], connect: Callable[[str, str, Path | None], Device]) -> Send:
    """Returns how a device sends its update; `connect` is that of `fetch_of`."""
    from keyhole.device.device import Device

    if not options["aggregators"]:
        minima = "min_clients", "min_noise", "min_clients_per_key"
        own = "aggregator_tokens", "aggregation", "ledger", "max_epsilon"
        refuse(options, (*own, *minima, "trust_service"), _WITH_TWO)
        return Device.send
    if bool(options["trainer_key"]) == options["trust_service"]:
        raise click.UsageError(
            "--aggregators goes with --trainer-key FILE, the public key of the trainer, or with "
            "--trust-service"
        )
    if options["trust_service"]:
        say(
            "keyhole: --trust-service: a service that gives this device a round of its own can "
            "read its update; pin the trainer's key (--trainer-key) to rule that out",
        )
    from keyhole.aggregation import shared_sum
    from keyhole.aggregation.privacy.ledger import Budget, Ledger, default_ledger
    from keyhole.device.sums import SumPolicy, SumSend, aggregator_of

    files = options["aggregator_tokens"] or (None, None)
    (one, first_key), (other, second_key) = map(aggregator_of, options["aggregators"])
    first, second = (
        connect(f"aggregator {party}", url, Path(file) if file else None)
        for party, (url, file) in enumerate(zip((one, other), files, strict=True))
    )
    policy = SumPolicy(
        options["min_clients"] or 2,
        min_noise=options["min_noise"] or 0.0,
        min_per_key=options["min_clients_per_key"] or 0,
        max_upload=options["max_bytes"] or SumPolicy.max_upload,
    )
    ledger = Ledger(options["ledger"] or default_ledger(), Budget(options["max_epsilon"] or inf))
    keys, aggregation = (first_key, second_key), shared_sum(options["aggregation"])
    return SumSend(first, second, keys, policy, aggregation, ledger, _name_of(options))


def _name_of(options: Mapping[str, Any]) -> str:
    """What a device is called in its ledger, which others of the machine may share: that of its
    client, or else of its token."""
    from keyhole.wire.assignment import device_name, name_in

    if options["client"] is not None:
        return device_name(options["client"])
    return (options["token_file"] and name_in(read_token(options["token_file"]))) or "device"


def check_served_clear(spec: RunSpec) -> None:
    """Refuses sums of devices without aggregators that are not made in the clear."""
    from keyhole.aggregation.base import about_of

    named = spec.aggregation.name
    about = about_of(aggregation_named(named.name)) if named else None
    is_clear = about is None or (about.is_in_clear and about.is_served)
    if spec.privacy or not is_clear:
        raise click.UsageError("secure sums and --dp-noise with devices take --aggregators")


def check_sum_flags(options: Mapping[str, Any], spec: RunSpec) -> None:
    """Refuses options that would do nothing."""
    name = aggregation_names()[0] if spec.aggregation.name is None else spec.aggregation.name.name
    secure = aggregation_names(lambda about: about.ring is not None)
    signed = aggregation_names(lambda about: about.can_sign)
    for option in ("value_clip", "ring_bits", "sum_metrics"):
        if options[option] is not None and name not in secure:
            raise click.UsageError(f"--{option.replace('_', '-')} goes with a secure --aggregation")
    if options.get("count_noise") and not spec.aggregation.min_clients_per_key:
        raise click.UsageError("--count-noise goes with --min-clients-per-key")
    if spec.aggregation.min_clients_per_key and spec.privacy:
        raise click.UsageError("--min-clients-per-key: under --dp-noise take --dp-kind thresholded")
    if options["above_norm"] is not None:
        if spec.aggregation.max_update_norm is None:
            raise click.UsageError("--above-norm goes with --max-update-norm")
        if name in secure:
            raise click.UsageError("--above-norm: a secure sum shows nobody how long an update is")
    _check_robust_flags(options, spec, name)
    if spec.aggregation.signed and name not in signed:
        raise click.UsageError(f"--signed goes with --aggregation {', '.join(signed)}")
    if options["value_clip"] is not None and spec.privacy and spec.privacy.clip < inf:
        raise click.UsageError("--value-clip does nothing beside --dp-clip, which bounds all of it")


def _check_robust_flags(options: Mapping[str, Any], spec: RunSpec, name: str) -> None:
    """Refuses options of robust sums, and the alarm, where nobody would look at them."""
    trimmed = aggregation_names(lambda about: about.can_trim)
    robust = aggregation_names(lambda about: about.is_robust)
    hidden = aggregation_names(lambda about: about.inputs != "checked")
    if options["trim"] is not None and name not in trimmed:
        raise click.UsageError(f"--trim goes with --aggregation {', '.join(trimmed)}")
    if options["untouched"] is not None and name not in robust:
        raise click.UsageError(f"--untouched goes with --aggregation {', '.join(robust)}")
    if spec.aggregation.untouched == "zeros" and spec.mean_over == "choosers":
        raise click.UsageError("--untouched zeros goes with --mean-over cohort")
    if options["norm_alarm"] is not None and name in hidden:
        raise click.UsageError("--norm-alarm: a secure sum shows nobody how long an update is")


def check_privacy_flags(options: Mapping[str, Any]) -> None:
    """Refuses options of privacy and of asynchronous rounds that lack what they go with.

    What a file of `--spec` says is not known here: `RunSpec` checks it.
    """
    if options.get("spec_file") is not None:
        return
    if options.get("max_staleness") is not None and options.get("concurrency") is None:
        raise click.UsageError("--max-staleness goes with --concurrency")
    names = ("noise", "clip", "delta", "budget", "kind", "threshold", "bands")
    given = {name for name in names if options.get(f"dp_{name}") is not None}
    if given and not given >= {"noise", "clip"}:
        raise click.UsageError("differential privacy takes --dp-noise and --dp-clip")
    kind = options.get("dp_kind")
    for name, needed in (("threshold", "thresholded"), ("bands", "correlated")):
        if name in given and kind != needed:
            raise click.UsageError(f"--dp-{name} goes with --dp-kind {needed}")
    if kind == "correlated" and not options.get("rounds"):
        raise click.UsageError("correlated noise is planned for a number of --rounds")
