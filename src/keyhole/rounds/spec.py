"""RunSpec: everything that decides a run, in one record; RunParts: the same as objects.

run.json, the manifest's settings, the run config of a Flower app, a TOML file and the options of
the command line are RunSpec. What a field means is said here, once, and is its option's help.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from msgspec import Meta

from keyhole.errors import InputError
from keyhole.identity import Ref, identity_of
from keyhole.rounds.best import BestSpec
from keyhole.rounds.cohorts import SIMULATED, CohortSpec, Draws
from keyhole.rounds.cohorts import Share as _Share
from keyhole.rounds.fields import VERSION, Record, convert, merge, nest, read
from keyhole.rounds.fields import Count as _Count
from keyhole.rounds.fields import CountOrNone as _CountOrNone
from keyhole.rounds.fields import NotNegative as _NotNegative
from keyhole.rounds.fields import Positive as _Positive
from keyhole.rounds.fields import said as _said
from keyhole.rounds.sum_spec import AggregationSpec, AsyncSpec, PopularSpec, PrivacySpec
from keyhole.sampling import Cohorts, check_count

if TYPE_CHECKING:
    from keyhole.aggregation.base import Aggregation, AggregationAbout
    from keyhole.aggregation.privacy.mechanism import Privacy
    from keyhole.delivery.base import Delivery
    from keyhole.keys.budget import DeviceClass
    from keyhole.keys.choice import KeyTable
    from keyhole.primitives.layout import Layout
    from keyhole.rounds.account import Account
    from keyhole.rounds.carried import Carried
    from keyhole.rounds.machine import Buffering
    from keyhole.server.inputs import AboveNorm, HeldBy, InputBound
    from keyhole.server.row_sums import Over

MeanOver = Literal["cohort", "choosers", "examples", "nothing"]

_DRAWN = ("random", "random-top", "independent")
_MAX_SEED = 2**32 - 1
_WHAT = "the record of a run"


class ClientSpec(Record, frozen=True, kw_only=True):
    """How clients train."""

    algorithm: Annotated[
        str, _said("What clients and the server do with gradients.", "--algorithm")
    ]
    lr: Annotated[_Positive, _said("Learning rate of the clients.", "--client-lr")]
    batch_size: Annotated[_Count, _said("Examples per local step.", "--batch-size")] = 20
    epochs: Annotated[
        _Count, _said("Passes of a client over its examples per round.", "--epochs")
    ] = 1
    momentum: Annotated[
        _Share, _said("Momentum of the clients' SGD; 0 is plain SGD.", "--client-momentum")
    ] = 0.0
    clip_norm: Annotated[
        _Positive | None,
        _said("L2 clipping norm of the gradient of each local step.", "--client-clip-norm"),
    ] = None
    max_examples: Annotated[
        _Count | None, _said("Max examples per client and round.", "--max-examples")
    ] = None
    min_examples: Annotated[
        _Count, _said("Leave out clients with fewer examples.", "--min-examples")
    ] = 1
    proximal: Annotated[_NotNegative, _said("FedProx: weight of the proximal term.")] = 0.01
    negatives: Annotated[
        _Share,
        _said(
            "so_word: share of a client's words drawn at random, for a sampled softmax.",
            "--negatives",
        ),
    ] = 0.0


class KeySpec(Record, frozen=True, kw_only=True):
    """How clients choose keys of one key space."""

    choice: Annotated[Ref, _said("How clients choose keys.")]
    count: Annotated[_Count | None, _said("Max keys per client; none for every key.")]
    shared: Annotated[bool, _said("All clients of a round draw the same keys.")] = False


class ServerSpec(Record, frozen=True, kw_only=True):
    """How the server steps."""

    lr: Annotated[_Positive, _said("Learning rate of the server.", "--server-lr")]
    eps: Annotated[
        _Positive,
        _said("Adaptive optimizers: added to the denominator of a step."),
    ] = 1e-3
    optimizer: Annotated[
        Ref | None,
        _said(
            "Optimizer of your own in place of the algorithm's: what module:NAME returns for the "
            "server's learning rate.",
            "--optimizer",
        ),
    ] = None
    parameters: Annotated[
        str,
        _said(
            "Optimizers of single parameters, between blanks: PATTERN=OPTIMIZER,SETTING=VALUE, "
            "such as 'items.*=adam,lr=0.01,warmup=100 out.bias=lr=0.1'. Optimizers are sgd, "
            "momentum, adagrad, adam and yogi; without one, or a setting, it is the run's. "
            "Schedules: warmup=STEPS, and decay=inverse-sqrt, linear or cosine with over=STEPS.",
            "--server-parameters",
        ),
    ] = ""


class DeviceSpec(Record, frozen=True, kw_only=True):
    """What a device is told of a run: how to choose keys and how to train, and no seed."""

    version: int
    task: Ref
    sizes: dict[str, int]
    client: ClientSpec
    keys: dict[str, KeySpec]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Returns the record that a round carries; raises InputError where it is not one."""
        return read(cls, told, "the record of a run that the round carries")


class RunSpec(Record, frozen=True, kw_only=True):
    """Everything that decides a run; `keyhole train --help` prints what its fields mean."""

    version: Annotated[int, _said("Version of this record.")] = VERSION
    task: Annotated[Ref, _said("What is trained: a task's name, or module:NAME.")]
    data: Annotated[
        Ref,
        _said(
            "A file or folder of a known format, a name of `keyhole data list`, `synthetic`, or "
            "module:NAME of a function that returns a Dataset for a seed.",
            "--data",
        ),
    ] = Ref("synthetic")
    held_out: Annotated[
        str | None,
        _said(
            "With data at devices: measure the model on the trainer's own examples in this file "
            "(.csv, .jsonl, .npz or .parquet) or folder of such files.",
            "--held-out",
        ),
    ] = None
    sizes: Annotated[dict[str, int], _said("Sizes of the model, such as words=50000.")]
    rounds: Annotated[_Count, _said("Rounds of training.", "--rounds")]
    evaluate_every: Annotated[
        _Count, _said("Rounds between two evaluations.", "--evaluate-every")
    ] = 10
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=_MAX_SEED)],
        _said(
            "Seed for all randomness; runs with the same seed have the same records and models, to "
            "the byte.",
            "--seed",
        ),
    ] = 0
    trial: Annotated[_CountOrNone, _said("Which repetition.")] = 0
    tuning: Annotated[bool, _said("Keep the validation clients out of training.")] = False
    cohort: CohortSpec
    client: ClientSpec
    keys: dict[str, KeySpec]
    server: ServerSpec
    delivery: Annotated[
        Ref | None,
        _said(
            "How slices reach clients; every delivery trains the same model. A private delivery "
            "that would send more than the whole model is refused.",
            "--delivery",
        ),
    ] = None
    popular: PopularSpec = PopularSpec()
    aggregation: AggregationSpec = AggregationSpec()
    mean_over: Annotated[
        MeanOver,
        _said(
            "Divide a key's sum by the cohort (Eq. 5), or by the number of clients that chose the "
            "key; or weight updates by the clients' numbers of examples, and divide by their sum.",
            "--mean-over",
        ),
    ] = "cohort"
    privacy: PrivacySpec | None = None
    asynchronous: AsyncSpec | None = None
    best: BestSpec | None = None
    metrics: Annotated[
        Ref | None,
        _said(
            "Metrics of your own beside the task's: module:NAME of a function that returns names "
            "and numbers for the server's state.",
            "--metrics",
        ),
    ] = None
    engine: Annotated[
        Ref,
        _said(
            "Where clients train: in this process, on Ray, or where module:NAME says. The result "
            "is the same, to the byte.",
            "--engine",
        ),
    ] = Ref("local")

    def __post_init__(self) -> None:
        super().__post_init__()
        drawn = [k for k in self.keys.values() if k.choice.name in _DRAWN and k.count is not None]
        if self.shared_keys and not all(each.shared for each in drawn):
            words = ", ".join(f"{space} {_word(each)}" for space, each in self.keys.items())
            raise InputError(
                f"fixed keys cannot be mixed with keys that each client draws: got {words}; "
                "expected fixed with top or all; choose one of the two"
            )

    @property
    def shared_keys(self) -> bool:
        """Whether all clients of a round draw from the same random numbers."""
        return any(each.shared for each in self.keys.values())

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Returns the record that `describe` wrote; raises InputError where it is of another
        version, or a field is unknown, missing or of another type."""
        return read(cls, told, _WHAT)

    @classmethod
    def read_older(cls, told: Mapping[str, Any]) -> Self:
        """Returns the same of a run that is only reported: fields that did not exist when it was
        written are at their defaults."""
        return convert(cls, told, _WHAT)

    def for_devices(self) -> dict[str, Any]:
        """Returns what a device may know, and all that it needs to train; see `DeviceSpec`."""
        told = self.describe()
        return {name: told[name] for name in DeviceSpec.__struct_fields__}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Returns the record with fields changed.

        Args:
            changes: nested as in `describe`, or with dotted names: {"client.lr": 0.1}; tables are
                merged.

        Raises:
            InputError: a field is unknown or of another type.
        """
        return convert(type(self), merge(self.describe(), nest(changes)), _WHAT)

    def with_trial(self, trial: int) -> Self:
        """Returns the record of another repetition."""
        return self.changed({"trial": trial})


def _word(keys: KeySpec) -> str:
    return "fixed" if keys.shared and keys.choice.name in _DRAWN else keys.choice.name


def _on_demand() -> Delivery:
    from keyhole.delivery.clear import OnDemand

    return OnDemand()


def _plain() -> Aggregation:
    from keyhole.aggregation.plain import PLAIN

    return PLAIN


@dataclass(frozen=True)
class RunParts:
    """What stays the same in every round of a run: the parts that a `RunSpec` names, as objects.

    Args:
        cohorts: who takes part.
        keys_per_client: key space -> most keys of a client; a client may choose fewer.
        devices: kinds of device; each client has one for good, and its memory bounds its keys too.
        seed: of everything random.
        trial: which repetition; both arms of a comparison use the same.
        over: what sums are divided by: the cohort (Eq. 5), those who chose the key, or, of updates
            that are weighted by examples, the sum of weights.
        max_weight: W, the max weight of an update where they are weighted: clients with more
            examples count as W; infinity for none.
        sum_metrics: metrics of clients that a secure sum adds up, and the max of each.
        delivery: how slices travel.
        aggregate: how updates are added up.
        privacy: what the run promises about one client; None promises nothing.
        max_update_norm: C, the max L2 norm of an update: clients clip to it, and who sees updates
            holds them to it; infinity for none.
        above_norm: what is done with an update above it where updates arrive in the clear.
        buffering: asynchronous rounds; None for synchronous ones.
        shared_keys: all clients that start in one round draw their keys from the same random
            numbers: random keys are the same for everybody, "fixed" in section 5.3, while keys that
            only depend on a client's data stay as they are.
        for_devices: what devices are told of the run, as `RunSpec.for_devices` returns it.
        norms: key space -> norms of the last updates, for choices that read them. Given {},
            synchronous rounds in process keep them; None keeps none.
        draws: how cohorts come about: from the seed, or from a secret of a run over a service.

    Raises:
        InputError: `over` or a number is not allowed, or asynchronous rounds do not go with the
            rest.
    """

    cohorts: Cohorts
    keys_per_client: Mapping[str, int]
    devices: tuple[DeviceClass, ...] = ()
    seed: int = 0
    trial: int = 0
    over: MeanOver = "cohort"
    max_weight: float = inf
    sum_metrics: Mapping[str, float] = field(default_factory=dict)
    delivery: Delivery = field(default_factory=_on_demand)
    aggregate: Aggregation = field(default_factory=_plain)
    privacy: Privacy | None = None
    max_update_norm: float = inf
    above_norm: AboveNorm = "refuse"
    buffering: Buffering | None = None
    shared_keys: bool = False
    for_devices: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, KeyTable] | None = None
    draws: Draws = SIMULATED

    def __post_init__(self) -> None:
        if self.over not in get_args(MeanOver):
            raise InputError(
                f"no such divisor: got {self.over}; expected {', '.join(get_args(MeanOver))}; "
                "choose one of them"
            )
        _ = self.bound  # checks itself
        if self.buffering is not None:
            self._check_stream(self.buffering)
        counts = {f"keys_per_client of {name!r}": m for name, m in self.keys_per_client.items()}
        for name, value in {"seed": self.seed, "trial": self.trial, **counts}.items():
            check_count(name, value, 0)

    @property
    def adds_in_blocks(self) -> bool:
        """Whether updates are added up as they are, so that sums of some of them can be, too."""
        return self.privacy is None and self._sum.adds_in_blocks

    @property
    def bound(self) -> InputBound:
        """How long an update may be, and whether who adds it up can tell."""
        from keyhole.server.inputs import InputBound

        about = self._sum
        is_checked = about.inputs == "checked"
        weight = self.max_weight if self.is_weighted else None
        norm = self.max_update_norm
        return InputBound(norm, self.above_norm, is_checked, about.needs_norms, weight)

    @property
    def is_weighted(self) -> bool:
        """Whether updates count by their clients' numbers of examples."""
        return self.over == "examples"

    @property
    def carried(self) -> Carried:
        """What updates carry of their clients' reports, where nobody sees an update."""
        from keyhole.rounds.carried import Carried

        if self.privacy is not None or self._sum.is_in_clear:
            return Carried()
        ring = self._sum.ring
        return Carried(self.is_weighted, self.sum_metrics, inf if ring is None else ring.clip)

    @property
    def divisor(self) -> Over:
        """What the aggregation divides by. The weight of all is known once it has added up; where
        privacy is promised it is nobody's to know, and the planned cohort stands in its place."""
        if self.over != "examples":
            return self.over
        return "nothing" if self.privacy is None else "cohort"

    @property
    def input_bound(self) -> HeldBy | Literal["none"]:
        """How the bound on updates is held. Where updates are not seen, that is never checked: each
        number is clipped on honest devices, at the least."""
        held = self._sum.inputs
        has_clip = self.privacy is not None and self.privacy.clip < inf
        return "none" if held == "checked" and not (self.bound.is_bound or has_clip) else held

    @property
    def _sum(self) -> AggregationAbout:
        from keyhole.aggregation.base import about_of

        return about_of(self.aggregate)

    def for_clients(self) -> RunParts:
        """Returns it without what the server alone needs, so that it can be sent to clients."""
        clear = replace(self, delivery=_on_demand(), aggregate=_plain())
        return replace(clear, privacy=None, buffering=None)

    def describe(self) -> dict[str, str]:
        """Returns it as text; two runs of one text train alike.

        Raises:
            InputError: a part has no identity; see `identity_of`.
        """
        return {each.name: _text(getattr(self, each.name)) for each in fields(self)}

    def account(self, layout: Layout) -> Account | None:
        """Returns what rounds spend; None where nothing is promised."""
        if self.privacy is None:
            return None
        from keyhole.rounds.account import Account

        keys, drawn = self.keys_per_client, self.draws.kind
        return Account.of(self.privacy, self.cohorts, self.aggregate, layout, keys, drawn)

    def draw_cohort(self, t: int) -> tuple[int, ...]:
        """Returns the clients asked in round t."""
        return self.draws.cohort(self.cohorts, self.seed, self.trial, t)

    def check(self, layout: Layout) -> None:
        """Raises InputError unless it fits the model, BudgetError if no round fits the budget."""
        from keyhole.aggregation.privacy.mechanism import PrivateSum
        from keyhole.rounds.clients import check_keys_per_client

        check_keys_per_client(layout, self.keys_per_client)
        if self.is_weighted:
            self._check_weights()
        if self.sum_metrics and self.privacy is not None:
            raise InputError(
                f"the privacy account covers no metrics: got {', '.join(self.sum_metrics)} to add "
                "up, with noise; expected none; leave --sum-metrics out"
            )
        # Rings that are too small, and promises that nobody can keep, show before the first round.
        if self._sum.ring is not None:
            self._sum.ring.for_clients(self.cohorts.asked)
        account = self.account(layout)
        if self.privacy is not None and account is not None:
            account.check(0)
            private = PrivateSum(self.aggregate, self.privacy, self.cohorts)
            private.check(layout, self.keys_per_client, self.divisor)

    def _check_weights(self) -> None:
        """Raises InputError where updates cannot be weighted."""
        about = self._sum
        bounded = {
            "differential privacy": self.privacy is not None,
            "a secure sum": about.ring is not None,
            "max_update_norm": self.max_update_norm < inf,
        }
        bounds = [name for name, is_there in bounded.items() if is_there]
        if bounds and self.max_weight == inf:
            raise InputError(
                f"a weight without a bound: got means over examples with {' and '.join(bounds)}; "
                "expected a max number of examples of a client, which bounds how much one adds; "
                "pass --max-examples, or RunParts(max_weight=...)"
            )
        if about.is_robust:
            raise InputError(
                f"a robust sum takes updates that count alike: got means over examples with "
                f"{about.name}; expected another mean or another sum; leave --mean-over out"
            )

    def _check_stream(self, buffering: Buffering) -> None:
        """Raises InputError where rounds cannot be asynchronous."""
        cohorts, limit = self.cohorts, max(buffering.concurrency, buffering.goal)
        about = self._sum
        if self.privacy is not None or not (about.is_in_clear and about.is_served):
            raise InputError(
                "asynchronous rounds are added up in the clear, without noise: got a secure sum or "
                "privacy; expected neither; use synchronous rounds"
            )
        if cohorts.sampling != "fixed":
            raise InputError(
                "asynchronous rounds take clients one after the other: got "
                f"{cohorts.sampling} sampling; expected fixed; use synchronous rounds"
            )
        if limit > cohorts.population:
            raise InputError(
                f"asynchronous rounds need more clients than there are: got {limit} at work, or "
                f"waited for; expected 1..{cohorts.population}; choose a smaller concurrency or "
                "cohort"
            )


def _text(value: Any) -> str:
    """A value in words that do not depend on where it lies in memory."""
    if is_dataclass(value) and type(value).__module__.startswith("keyhole."):
        counted = [f.name for f in fields(value) if f.compare and f.init]
        inner = ", ".join(f"{name}={_text(getattr(value, name))}" for name in counted)
        return f"{type(value).__name__}({inner})"
    if type(value) in (dict, MappingProxyType):
        return ", ".join(f"{name}: {_text(value[name])}" for name in sorted(value))
    if type(value) is tuple:  # a subclass may be a part, with code of its own
        return ", ".join(map(_text, value))
    return value if type(value) is str else identity_of(value)
