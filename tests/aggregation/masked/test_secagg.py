"""The sum of a secure sum is the sum in the ring, whoever is lost when, or there is none."""

from itertools import product

import numpy as np
import pytest

from keyhole.aggregation.masked.messages import UnmaskRequest, open_slots, seal_asked, seal_slots
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.server import run_secagg
from keyhole.errors import InputError, MalformedError, ReplayError, ShapeError, ThresholdError
from tests.aggregation.masked.secagg_parties import (
    ROUND,
    Parties,
    forgot_everything,
    plain_sum,
    seeded,
    settings_of,
    vectors_of,
)

STAGES = ("before", "after_keys", "after_shares", "after_input")
CHOICES = (*STAGES, "stays")


def outcome(settings, lost):
    """Who is in the sum, or None if it must not be opened: by counting."""
    stages = [CHOICES.index(lost.get(place, "stays")) for place in range(settings.cohort)]
    left = [sum(stage > step for stage in stages) for step in range(4)]
    if min(left) < settings.shares_needed:
        return None
    return tuple(place for place, stage in enumerate(stages) if stage > 2)


def check_fate(settings, lost):
    """Returns whether a sum was opened, after comparing it with the plain one."""
    survivors = outcome(settings, lost)
    if survivors is None:
        with pytest.raises(ThresholdError):
            run_secagg(settings, vectors_of(settings), lost)
        return False
    result = run_secagg(settings, vectors_of(settings), lost)
    assert result.survivors == survivors
    assert result.total.dtype == settings.dtype
    np.testing.assert_array_equal(result.total, plain_sum(settings, survivors))
    return True


def patterns(cohort):
    """Every way in which clients can be lost."""
    for stages in product(CHOICES, repeat=cohort):
        yield {place: stage for place, stage in enumerate(stages) if stage != "stays"}


# The sum


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("cohort", [2, 3, 7])
def test_the_sum_is_the_plain_ring_sum_bit_for_bit(bits, signed, cohort):
    settings = settings_of(cohort, length=1001, bits=bits, signed=signed)
    result = run_secagg(settings, vectors_of(settings))
    np.testing.assert_array_equal(result.total, plain_sum(settings, range(cohort)))


@pytest.mark.parametrize("bits", [16, 32])
def test_sums_wrap_at_the_edge_of_the_ring(bits):
    settings = settings_of(3, length=2, bits=bits)
    top = 2**bits - 1
    vectors = {place: np.array([top, top // 2], settings.dtype) for place in range(3)}
    expected = np.array([3 * top % 2**bits, 3 * (top // 2) % 2**bits], settings.dtype)
    np.testing.assert_array_equal(run_secagg(settings, vectors).total, expected)


@pytest.mark.parametrize("cohort", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pattern_of_loss_gives_the_sum_of_survivors_or_nothing(cohort):
    settings = settings_of(cohort)
    opened = [check_fate(settings, lost) for lost in patterns(cohort)]
    assert 0 < sum(opened) < len(opened) == 5**cohort


@pytest.mark.slow
@pytest.mark.parametrize(("cohort", "threshold"), [(5, None), (5, 2), (6, None)])
def test_every_pattern_of_loss_among_more_clients_too(cohort, threshold):
    settings = settings_of(cohort, threshold=threshold)
    opened = [check_fate(settings, lost) for lost in patterns(cohort)]
    assert 0 < sum(opened) < len(opened) == 5**cohort


@pytest.mark.slow
def test_every_pattern_of_loss_in_a_signed_sum():
    settings = settings_of(4, signed=True)
    opened = [check_fate(settings, lost) for lost in patterns(4)]
    assert 0 < sum(opened) < len(opened)


def some_loss(cohort, number, share):
    """A pattern in which each client is lost with probability `share`."""
    prg = seeded(number)
    is_lost = prg.below(1000, cohort) < 1000 * share
    stages = prg.below(4, cohort)
    return {place: STAGES[stages[place]] for place in np.flatnonzero(is_lost).tolist()}


def test_a_random_loss_of_fifty_gives_the_sum_of_survivors():
    lost = some_loss(50, 0, 0.2)
    assert len(lost) > 2
    assert check_fate(settings_of(50, bits=16), lost)


@pytest.mark.slow
def test_many_random_losses_of_fifty():
    """Around the threshold of 34 of 50: some open and some do not."""
    lost = [some_loss(50, number, 0.3) for number in range(60)]
    opened = [check_fate(settings_of(50), some) for some in lost]
    assert 5 < sum(opened) < 55


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_sum_opens_from_the_threshold_on(stage, beyond):
    settings = settings_of(9)
    stay = settings.shares_needed + beyond
    # Those who leave stand first, in between and last.
    order = seeded(3).permutation(9).tolist()
    is_open = check_fate(settings, dict.fromkeys(order[stay:], stage))
    assert is_open == (beyond >= 0)


@pytest.mark.parametrize("step", ["shares", "input", "unmasking"])
def test_below_the_threshold_the_server_keeps_nothing_and_says_so(step):
    settings = settings_of(4)
    parties = Parties(settings).until({"shares": "keys", "input": "shares"}.get(step, step))
    if step == "unmasking":
        parties.do("unmasking", range(settings.shares_needed - 1))
        with pytest.raises(ThresholdError):
            parties.server.sum()
    else:
        before = {"shares": "keys", "input": "shares"}[step]
        parties.do(before, range(settings.shares_needed - 1))
        with pytest.raises(ThresholdError):
            parties.list_for(step, 0)
    held = vars(parties.server)
    assert not any(isinstance(value, np.ndarray) for value in held.values())
    assert not any(held[name] for name in ("_keys", "_shares", "_unmasking"))
    with pytest.raises(ReplayError):
        parties.server.sum()


def test_below_the_threshold_of_survivors_no_client_gives_a_share():
    """Whatever the server says: a client counts the survivors itself."""
    parties = Parties(settings_of(4)).until("input")
    parties.do("input", range(2))
    with pytest.raises(ThresholdError):
        parties.list_for("unmasking", 0)
    asked = UnmaskRequest(frozenset({0, 1}), frozenset({2, 3}))
    with pytest.raises(ThresholdError):
        parties.clients[0].unmask(seal_asked(parties.settings, 0, asked))
    assert parties.clients[0].has_left


@pytest.mark.parametrize("step", ["shares", "input"])
def test_below_the_threshold_a_client_sends_neither_shares_nor_a_vector(step):
    """Whatever the server says: the lists name one client too few, then as many as must be."""
    kind = {"shares": "key list", "input": "share list"}[step]
    for named in (3, 2):
        parties = Parties(settings_of(4)).until(step)
        slots = open_slots(parties.list_for(step, 0), kind, parties.settings, 0)
        some = {place: slot for place, slot in slots.items() if place < named}
        listed = seal_slots(kind, parties.settings, 0, some)
        if named == parties.settings.shares_needed:
            parties.answer(step, 0, listed)
            continue
        with pytest.raises(ThresholdError):
            parties.answer(step, 0, listed)
        assert forgot_everything(parties.clients[0])


@pytest.mark.parametrize("signed", [False, True])
def test_every_pattern_of_late_vectors_gives_the_sum_of_the_others_or_nothing(signed):
    settings = settings_of(4, signed=signed)
    for is_late in product([False, True], repeat=4):
        late = [place for place in range(4) if is_late[place]]
        on_time = [place for place in range(4) if not is_late[place]]
        if len(on_time) < settings.shares_needed:
            with pytest.raises(ThresholdError):
                run_secagg(settings, vectors_of(settings), late=late)
        else:
            total = run_secagg(settings, vectors_of(settings), late=late).total
            np.testing.assert_array_equal(total, plain_sum(settings, on_time))


# The sparse graph


@pytest.mark.slow
def test_above_two_hundred_clients_the_graph_is_sparse_and_the_sum_the_same():
    settings = settings_of(220)
    assert len(settings.group(0)) < 110
    lost = some_loss(220, 5, 0.1)
    assert check_sparse(settings, lost)


def check_sparse(settings, lost):
    survivors = tuple(
        place for place in range(settings.cohort) if lost.get(place, "after_input") == "after_input"
    )
    result = run_secagg(settings, vectors_of(settings), lost)
    np.testing.assert_array_equal(result.total, plain_sum(settings, survivors))
    return result.survivors == survivors


@pytest.mark.parametrize("lost", [{}, {3: "after_shares"}, {0: "after_input", 7: "before"}])
def test_a_sparse_graph_gives_the_same_sum(lost):
    settings = settings_of(12, degree=6, threshold=4)
    assert [len(settings.group(place)) for place in range(12)] == [7] * 12
    assert check_sparse(settings, lost)


@pytest.mark.parametrize("step", ["shares", "input", "unmasking"])
def test_a_sparse_graph_with_a_group_that_is_lost_releases_nothing(step):
    """Most clients stay, but of one group too few: no client is even asked."""
    settings = settings_of(18, degree=4, threshold=4)
    order = ("keys", "shares", "input", "unmasking")
    before = order[order.index(step) - 1]
    gone = [place for place in settings.group(5) if place != 5][:2]
    left = [place for place in range(18) if place not in gone]
    parties = Parties(settings).until(before)
    parties.do(before, left)
    with pytest.raises(ThresholdError):
        parties.list_for(step, left[0])
    with pytest.raises(ReplayError):
        parties.server.sum()


@pytest.mark.parametrize("stay", [12, 13])
def test_a_sparse_graph_sums_no_fewer_than_the_complete_one_would(stay):
    """Two of a group would do for its secrets, but a sum of 18 has floor(2 * 18 / 3) + 1 inputs."""
    settings = settings_of(18, degree=4, threshold=2)
    left = range(stay)
    assert min(len(set(settings.group(place)) & set(left)) for place in range(18)) >= 2
    parties = Parties(settings).until("input")
    parties.do("input", left)
    if stay < 13:
        with pytest.raises(ThresholdError):
            parties.list_for("unmasking", 0)
    else:
        parties.do("unmasking", left)
        np.testing.assert_array_equal(parties.server.sum(), plain_sum(settings, left))


def test_the_graph_changes_with_the_round():
    one, other = (SecAggParams(bytes([n]) * 16, 30, 1, degree=6, threshold=4) for n in (1, 2))
    assert [one.group(n) for n in range(30)] != [other.group(n) for n in range(30)]


# What it costs, and what cannot be


def test_what_a_client_sends_and_receives_depends_on_the_settings_alone():
    settings = settings_of(7, length=11)
    whole = run_secagg(settings, vectors_of(settings))
    fewer = run_secagg(settings, vectors_of(settings), {1: "before", 2: "after_shares"})
    assert len(set(whole.bytes_up.values())) == len(set(whole.bytes_down.values())) == 1
    assert (whole.bytes_up[0], whole.bytes_down[0]) == (fewer.bytes_up[0], fewer.bytes_down[0])
    assert fewer.bytes_up[1] == fewer.bytes_down[1] == 0
    # Four frames of 76 bytes; keys, a bit and a slot for each of seven, the vector, shares.
    assert whole.bytes_up[0] == 4 * 76 + 96 + (1 + 7 * 148) + 44 + (1 + 7 * 66)
    assert whole.bytes_down[0] == 3 * 76 + (1 + 7 * 96) + (1 + 7 * 148) + 2


def test_places_that_bring_no_vector_are_lost_from_the_start():
    settings = settings_of(4)
    vectors = vectors_of(settings)
    del vectors[2]
    result = run_secagg(settings, vectors)
    np.testing.assert_array_equal(result.total, plain_sum(settings, [0, 1, 3]))


@pytest.mark.parametrize("lost", [{4: "before"}, {-1: "before"}, {1: "later"}])
def test_a_place_or_a_stage_that_there_is_not_is_refused(lost):
    with pytest.raises(InputError):
        run_secagg(settings_of(4), vectors_of(settings_of(4)), lost)


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": b"short"},
        {"cohort": 1},
        {"cohort": 2**16 + 1},
        {"length": 0},
        {"bits": 8},
        {"threshold": 1},
        {"threshold": 5},
        {"degree": 1},
        {"degree": 4},
        {"cohort": 2**16, "degree": 2**16 - 2},
        {"cohort": 2**16, "degree": 258},
        {"signed": True, "degree": 2},
        {"signed": True, "threshold": 2},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        SecAggParams(**{"round": ROUND, "cohort": 4, "length": 3} | wrong)


def test_settings_travel():
    for settings in (
        settings_of(4),
        settings_of(9, bits=16, threshold=5, degree=6),
        settings_of(300, signed=True),
    ):
        data = settings.encode()
        assert SecAggParams.decode(data) == settings
        for bad in (data[:-1], data + b"\0", b"KHG2" + data[4:], data[:5] + b"\x07" + data[6:]):
            with pytest.raises(MalformedError):
                SecAggParams.decode(bad)


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(4, np.uint32),
        np.zeros((3, 1), np.uint32),
        np.zeros(3, np.uint16),
        np.zeros(3, np.int32),
        np.zeros(3, np.float32),
    ],
    ids=lambda vector: f"{vector.dtype}{vector.shape}",
)
def test_a_vector_of_another_length_or_ring_is_refused_and_the_client_goes_on(vector):
    parties = Parties(settings_of(4)).until("input")
    shares = parties.list_for("input", 1)
    with pytest.raises(ShapeError):
        parties.clients[1].mask(shares, vector)
    parties.do("input")
    parties.do("unmasking")
    np.testing.assert_array_equal(parties.server.sum(), plain_sum(settings_of(4), range(4)))
