"""Two aggregators over sockets: the plain sum in the ring, and what they refuse."""

import os
import threading
from contextlib import closing

import msgspec
import numpy as np
import pytest

from keyhole.aggregation.shares import SEAL_BYTES, seal_share
from keyhole.crypto.hpke import PrivateKey
from keyhole.errors import (
    AccessError,
    BusyError,
    ConflictError,
    InputError,
    KeyholeError,
    MalformedError,
    MismatchError,
    NotAdmittedError,
    NotFoundError,
    ServiceError,
    StaleError,
    StorageError,
    TooLargeError,
    TooLateError,
)
from keyhole.service.sum_files import SumFiles, sealing_key
from keyhole.wire.assignment import shown
from tests.helpers import LONG, eventually
from tests.service.sums.aggregators import (
    COHORT,
    aggregators,
    bodies_of,
    facts_at,
    plain_sum,
    round_name,
    rows_of,
    terms_of,
)

ROUND = round_name()


@pytest.fixture
def pair(tmp_path):
    with aggregators(tmp_path) as pair:
        yield pair


@pytest.mark.parametrize("bits", [32, pytest.param(16, marks=pytest.mark.slow)])
def test_the_combined_shares_are_the_plain_ring_sum_bit_for_bit(pair, bits):
    terms = terms_of(bits=bits)
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT)]
    pair.close(ROUND)
    assert [set(one.devices) for one in pair.wait(ROUND)] == [set(COHORT)] * 2
    pair.check_sum(ROUND, terms, rows)


def test_a_device_that_reached_one_aggregator_is_left_out_by_both(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:3])]
    pair.share(ROUND, terms, COHORT[3], 3, to=[0])
    pair.share(ROUND, terms, COHORT[4], 4, to=[1])
    pair.close(ROUND)
    assert [one.devices for one in pair.wait(ROUND)] == [COHORT[:3]] * 2
    pair.check_sum(ROUND, terms, rows)


def test_a_device_that_tells_both_different_things_is_left_out(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:2])]
    pair.share(ROUND, terms, COHORT[2], 2, to=[0])
    pair.share(ROUND, terms, COHORT[2], 99, to=[1])
    pair.close(ROUND)
    assert [one.devices for one in pair.wait(ROUND)] == [COHORT[:2]] * 2
    pair.check_sum(ROUND, terms, rows)


def test_a_sum_that_is_never_closed_closes_by_itself(tmp_path):
    """At both, and everybody who is there is added."""
    with aggregators(tmp_path, close_after=LONG) as pair:
        terms = terms_of()
        pair.open(ROUND, terms)
        rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:3])]
        for app in pair.apps:  # it has been open for long
            os.utime(app.sums.files.path(ROUND, "opening"), (0, 0))
        assert [one.devices for one in pair.wait(ROUND)] == [COHORT[:3]] * 2
        pair.check_sum(ROUND, terms, rows)


def test_both_give_out_the_same_receipt_and_shares_that_hold_it(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    with pytest.raises(ServiceError):
        pair.trainer(0).receipt(ROUND, facts_at(terms), len(COHORT))
    for seed, name in enumerate(COHORT[1:4]):
        pair.share(ROUND, terms, name, seed)
    pair.close(ROUND)
    pair.wait(ROUND)
    one, other = (pair.trainer(p).receipt(ROUND, facts_at(terms), len(COHORT)) for p in (0, 1))
    assert one == other
    assert (one.model, one.places) == (facts_at(terms).model, (1, 2, 3))
    for party in (0, 1):
        assert pair.trainer(party).share(ROUND, facts_at(terms)).receipt == one.digest


def test_closing_and_forgetting_twice_at_once_change_nothing(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    for seed, name in enumerate(COHORT[:2]):
        pair.share(ROUND, terms, name, seed)
    for act in ("close_sum", "forget"):
        met = []

        def run(party, act=act, met=met):
            with closing(pair.new_trainer(party)) as line:
                try:
                    getattr(line, act)(ROUND)
                except KeyholeError as error:
                    met.append(error)

        threads = [threading.Thread(target=run, args=(party,)) for party in (0, 0, 0, 1, 1, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert met == []
        if act == "close_sum":
            assert {one.phase for one in pair.wait(ROUND)} == {"ready"}
    assert pair.trainer(0).rounds() == []


def test_by_default_two_thirds_of_the_cohort_must_come_unless_noise_is_added(tmp_path):
    with aggregators(tmp_path, min_clients=None) as pair:
        first, names = pair.trainer(0), [f"device-{i}" for i in range(50)]
        for least, is_fine in ((33, False), (34, True)):
            terms = terms_of(b"%d" % least, cohort=50, minimum=least)
            at = round_name(b"%d" % least)
            if is_fine:
                first.open(at, terms.encode(), names)
            else:
                with pytest.raises(InputError, match="expected at least 34 of 50"):
                    first.open(at, terms.encode(), names)
        noisy = terms_of(b"n", cohort=50, minimum=2, noise=1.0, clip=1.0, norm=1.0, room=20)
        first.open(round_name(b"n"), noisy.encode(), names)


def test_with_too_few_clients_nothing_is_given_out_and_shares_are_gone(pair, tmp_path):
    terms = terms_of(minimum=3)
    pair.open(ROUND, terms)
    for seed, name in enumerate(COHORT[:2]):
        pair.share(ROUND, terms, name, seed)
    pair.share(ROUND, terms, COHORT[2], 2, to=[0])
    pair.close(ROUND)
    for one in pair.wait(ROUND):
        assert (one.phase, one.failure.kind) == ("failed", "ThresholdError")
    for party in (0, 1):
        with pytest.raises(TooLateError):
            pair.trainer(party).share(ROUND, facts_at(terms))
        assert not list((tmp_path / str(party)).rglob("share"))
        uploads = tmp_path / str(party) / "uploads" / ROUND
        assert eventually(lambda folder=uploads: not list(folder.glob("device*")))


def test_aggregators_that_were_told_different_cohorts_release_nothing(pair):
    terms = terms_of()
    pair.trainer(0).open(ROUND, terms.encode(), COHORT)
    pair.trainer(1).open(ROUND, terms.encode(), COHORT[::-1])
    for seed, name in enumerate(COHORT):
        pair.share(ROUND, terms, name, seed)
    pair.close(ROUND)
    assert {one.phase for one in pair.wait(ROUND)} == {"failed"}


def test_a_trainer_cannot_tell_one_aggregator_a_smaller_minimum(pair):
    """Devices share under the terms of the manifest; whoever was told others refuses them."""
    told, other = terms_of(minimum=5), terms_of(minimum=2)
    pair.trainer(0).open(ROUND, told.encode(), COHORT)
    pair.trainer(1).open(ROUND, other.encode(), COHORT)
    with pytest.raises(StaleError):
        pair.share(ROUND, told, COHORT[0], 0)


def test_the_same_share_is_given_out_however_often_it_is_asked_for(pair, tmp_path):
    """Noise is drawn once: of two different shares, the difference of noises would be known."""
    terms = terms_of(noise=1.0, clip=1.0, norm=1.0, room=20)
    pair.open(ROUND, terms)
    for seed, name in enumerate(COHORT):
        pair.share(ROUND, terms, name, seed)
    pair.close(ROUND)
    pair.wait(ROUND)
    before = [pair.trainer(party).share(ROUND, facts_at(terms)) for party in (0, 1)]
    pair.close(ROUND)  # again
    for party in (0, 1):
        pair.stop(party)
        pair.start(party)
        again = pair.trainer(party).share(ROUND, facts_at(terms))
        assert before[party].payload == again.payload


def test_noise_of_both_aggregators_is_in_the_sum(pair):
    terms = terms_of(noise=0.01, clip=1.0, norm=1.0, room=1)
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT)]
    pair.close(ROUND)
    pair.wait(ROUND)
    pairs = zip(pair.combined(ROUND, terms), plain_sum(terms, rows), strict=True)
    noise = np.concatenate([(one - other).view(np.int32).reshape(-1) for one, other in pairs])
    # Standard deviation of the sum of two; 4,910 numbers give it to within 5 % at five sigma.
    assert noise.std() / (2**0.5 * terms.ring_noise) == pytest.approx(1, rel=0.05)


def test_counts_that_were_told_stay_when_an_aggregator_is_started_again(pair, tmp_path):
    """Killed before its share was on the disk: with noise drawn anew it would drop other rows."""
    terms = terms_of(min_per_key=3, count_noise=2.0)
    pair.open(ROUND, terms)
    for seed, name in enumerate(COHORT):
        pair.share(ROUND, terms, name, seed)
    pair.close(ROUND)
    pair.wait(ROUND, ("ready",))
    before = pair.trainer(0).share(ROUND, facts_at(terms))
    pair.stop(0)
    (tmp_path / "0" / "sums" / ROUND / "share").unlink()
    pair.start(0)
    pair.wait(ROUND, ("ready",))
    again = pair.trainer(0).share(ROUND, facts_at(terms))
    assert (again.told, again.payload) == (before.told, before.payload)
    assert again.told == pair.trainer(1).share(ROUND, facts_at(terms)).told


def test_a_device_that_was_stopped_between_the_two_shares_anew_while_the_sum_is_open(pair):
    """The trainer, or the second aggregator, was away for longer than it tried again."""
    terms = terms_of()
    pair.open(ROUND, terms)
    first, second = (bodies_of(terms, rows_of(terms, seed), seed) for seed in (1, 2))
    assert pair.send(0, ROUND, COHORT[0], first[0]) == b'{"share":"stored"}'
    for party in (0, 1):
        assert pair.send(party, ROUND, COHORT[0], second[party]) == b'{"share":"stored"}'
        assert pair.send(party, ROUND, COHORT[0], second[party]) == b'{"share":"known"}'
    rows = [rows_of(terms, 2), pair.share(ROUND, terms, COHORT[1], 3)]
    pair.close(ROUND)
    for party in (0, 1):
        with pytest.raises(ConflictError):
            pair.send(party, ROUND, COHORT[0], first[party])
    pair.wait(ROUND)
    pair.check_sum(ROUND, terms, rows)


def test_a_share_that_was_replaced_at_one_aggregator_alone_is_left_out(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:3])]
    pair.share(ROUND, terms, COHORT[0], 9, to=(1,))
    pair.close(ROUND)
    assert [one.devices for one in pair.wait(ROUND)] == [COHORT[1:3]] * 2
    pair.check_sum(ROUND, terms, rows[1:])


def test_another_devices_message_is_not_added_a_second_time(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:3])]
    for party, body in enumerate(bodies_of(terms, rows[0], 0)):
        pair.send(party, ROUND, COHORT[5], body)
    pair.close(ROUND)
    pair.wait(ROUND)
    pair.check_sum(ROUND, terms, rows)


@pytest.mark.parametrize("party", [0, 1])
def test_strangers_late_ones_and_foreign_messages_are_refused(pair, party):
    terms, other = terms_of(), terms_of(b"b")
    pair.open(ROUND, terms)
    body = bodies_of(terms, rows_of(terms, 1))[party]
    own = terms.facts.own_message_bytes(party)
    refusals = [
        (lambda: pair.send(party, ROUND, "device-77", body), NotAdmittedError),
        (lambda: pair.send(party, ROUND, COHORT[0], body, token="kh2.x.y"), AccessError),
        (lambda: pair.send(party, round_name(b"z"), COHORT[0], body), NotFoundError),
        (lambda: pair.send(party, "../../x", COHORT[0], body), NotFoundError),
        (lambda: pair.send(party, ROUND, COHORT[0], body[:-1]), MalformedError),
        (lambda: pair.send(party, ROUND, COHORT[0], body + b"0"), TooLargeError),
        (lambda: pair.send(party, ROUND, COHORT[0], bytes(len(body))), MalformedError),
        (
            lambda: pair.send(party, ROUND, COHORT[0], bodies_of(other, rows_of(other, 1))[party]),
            StaleError,
        ),
    ]
    if party == 0:
        mixed = body[:own] + bodies_of(terms, rows_of(terms, 2), 2)[0][own:]
        refusals.append((lambda: pair.send(0, ROUND, COHORT[0], mixed), MismatchError))
    for act, kind in refusals:
        with pytest.raises(kind):
            act()
    assert pair.trainer(party).status(ROUND).devices == []
    round_token = pair.device_token(party, COHORT[0], "round", round_id=round_name(b"b"))
    with pytest.raises(NotAdmittedError):
        pair.send(party, ROUND, COHORT[0], body, token=round_token)
    round_token = pair.device_token(party, COHORT[0], "round", round_id=ROUND)
    pair.send(party, ROUND, COHORT[0], body, token=round_token)
    pair.trainer(party).close_sum(ROUND)
    with pytest.raises(TooLateError):
        pair.send(party, ROUND, COHORT[1], bodies_of(terms, rows_of(terms, 2), 2)[party])
    assert b"known" in pair.send(party, ROUND, COHORT[0], body)


@pytest.mark.parametrize("party", [0, 1])
def test_what_is_not_sealed_to_the_key_of_an_aggregator_for_the_round_is_refused(pair, party):
    terms = terms_of()
    pair.open(ROUND, terms)
    body, own = bodies_of(terms, rows_of(terms, 1))[party], pair.public(party)
    token, another = (pair.device_token(party, COHORT[0]) for _ in range(2))
    good = seal_share(own, ROUND, COHORT[0], token, body)
    damaged = bytes([*good[:60], good[60] ^ 1, *good[61:]])
    wrong_key = seal_share(PrivateKey.fresh().public, ROUND, COHORT[0], token, body)
    for sealed, words in [
        (body + bytes(SEAL_BYTES), "another key"),
        (wrong_key, "another key"),
        (own[:0] + good[:8] + wrong_key[8:], "cannot be opened"),
        (damaged, "cannot be opened"),
        (seal_share(own, round_name(b"b"), COHORT[0], token, body), "cannot be opened"),
        (seal_share(own, ROUND, COHORT[1], token, body), "cannot be opened"),
        (seal_share(own, ROUND, COHORT[0], another, body), "cannot be opened"),
        (seal_share(own, ROUND, COHORT[0], shown(token), body), "cannot be opened"),
        (seal_share(own, ROUND, "", token, body), "cannot be opened"),
    ]:
        with pytest.raises(MalformedError, match=words):
            pair.send(party, ROUND, COHORT[0], body, token=token, sealed=sealed)
    assert b"stored" in pair.send(party, ROUND, COHORT[0], body, token=shown(token), sealed=good)
    assert b"known" in pair.send(party, ROUND, COHORT[0], body, token=token, sealed=good)
    assert b"known" in pair.send(party, ROUND, COHORT[0], body)  # sealed anew


def test_the_key_of_an_aggregator_stays_and_is_its_owners(pair, tmp_path):
    before = pair.public(0)
    pair.stop(0)
    pair.start(0)
    assert pair.public(0) == before != pair.public(1)
    assert (tmp_path / "0" / "seal.key").stat().st_mode & 0o777 == 0o600
    pair.stop(0)
    (tmp_path / "0" / "seal.key").write_text("no key")
    with pytest.raises(StorageError, match="64 hex digits"):
        sealing_key(tmp_path / "0")


def test_what_a_trainer_may_not_open_is_refused(tmp_path):
    with aggregators(tmp_path, min_clients=3, max_sums=1, max_table=10**5) as pair:
        first = pair.trainer(0)
        large = terms_of(minimum=3, cohort=10**6)
        refusals = [
            (lambda: first.open(ROUND, terms_of(minimum=2).encode(), COHORT), InputError),
            (
                lambda: first.open(ROUND, terms_of(minimum=3, cohort=3).encode(), COHORT),
                TooLargeError,
            ),
            (lambda: first.open(ROUND, large.encode(), [COHORT[0]] * 3), TooLargeError),
            (lambda: first.open(ROUND, large.encode(), ["../x"]), InputError),
            (lambda: first.open("nonsense", large.encode(), COHORT), NotFoundError),
        ]
        for act, kind in refusals:
            with pytest.raises(kind):
                act()
        wrong = pair.trainer(0, "confused")
        wrong.party = 1
        with pytest.raises(ConflictError, match="other aggregator"):
            wrong.open(ROUND, terms_of(minimum=3).encode(), COHORT)
        first.open(ROUND, terms_of(minimum=3).encode(), COHORT)
        first.open(ROUND, terms_of(minimum=3).encode(), COHORT)
        with pytest.raises(ConflictError):
            first.open(ROUND, terms_of(minimum=4).encode(), COHORT)
        with pytest.raises(ServiceError, match="503"):  # too many sums: come back later
            first.open(round_name(b"b", 1), terms_of(b"b", minimum=3).encode(), COHORT)


def test_a_sum_is_its_trainers_alone_and_its_name_is_used_once(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    stranger = pair.trainer(0, "somebody")
    assert stranger.rounds() == []
    for act in (stranger.status, stranger.close_sum, stranger.forget):
        with pytest.raises(NotFoundError):
            act(ROUND)
    with pytest.raises(ConflictError):
        stranger.open(ROUND, terms.encode(), COHORT)
    with pytest.raises(ConflictError, match="name"):
        pair.trainer(0).open(round_name(b"b", 1), terms.encode(), COHORT)
    pair.trainer(0).forget(ROUND)
    assert pair.trainer(0).rounds() == []
    with pytest.raises(TooLateError):
        pair.trainer(0).open(ROUND, terms.encode(), COHORT)


def test_tokens_of_one_kind_of_caller_are_worth_nothing_for_another(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    device, peer = pair.device(0, COHORT[0]), pair.peer_key
    trainer = pair.trainer(0)
    strange = peer.issue("device", "x", now=0, seconds=1e12, audience="aggregator")
    for token in (device.token_for(ROUND), strange):
        for path in ("", "/share", "/list"):
            with pytest.raises((AccessError, NotAdmittedError)):
                device.client.get(f"/v1/sums/{ROUND}{path}", token=token, limit=10**6)
    for path in ("/list", f"/publics/{COHORT[0]}"):
        with pytest.raises(AccessError):
            device.client.get(f"/v1/sums/{ROUND}{path}", token=trainer._token, limit=10**6)
    device.close()


def test_the_other_aggregator_gets_what_devices_sent_only_after_the_close(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    pair.share(ROUND, terms, COHORT[0], 0)
    line = pair.apps[1]._finisher._peer
    for act in (
        lambda: line.get(ROUND, "list", 10**6),
        lambda: line.get(ROUND, f"publics/{COHORT[0]}", 10**6),
    ):
        with pytest.raises(ServiceError, match="503"):
            act()


def test_one_key_for_two_kinds_of_caller_is_refused(pair):
    keys = pair.keys[0]
    with pytest.raises(InputError, match="one key for different callers"):
        type(keys)(keys.devices, keys.devices, keys.peer)


def test_no_error_metric_or_status_holds_a_key_or_a_share(pair):
    terms = terms_of()
    pair.open(ROUND, terms)
    pair.share(ROUND, terms, COHORT[0], 0)
    page = pair.apps[0].metrics.page().decode()
    assert "device-" not in page
    assert 'route="sum shares"' in page
    with pytest.raises(KeyholeError) as caught:
        pair.send(0, ROUND, "device-77", b"")
    assert "device-77" not in str(caught.value)
    assert msgspec.to_builtins(pair.trainer(0).status(ROUND)) == {
        "phase": "open",
        "devices": [COHORT[0]],
        "waiting": "",
        "failure": None,
    }


@pytest.mark.slow
def test_many_devices_at_once_are_all_taken(pair):
    names = [f"device-{i}" for i in range(24)]
    terms = terms_of(cohort=24)
    pair.open(ROUND, terms, names)
    rows = {}

    def live(seed, name):
        rows[seed] = pair.share(ROUND, terms, name, seed)

    threads = [threading.Thread(target=live, args=each) for each in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair.close(ROUND)
    assert [len(one.devices) for one in pair.wait(ROUND)] == [24, 24]
    pair.check_sum(ROUND, terms, rows.values())


def test_busy_is_what_a_share_is_before_it_is_ready(pair):
    pair.open(ROUND, terms_of())
    with pytest.raises((BusyError, ServiceError)):
        pair.trainer(0).share(ROUND, facts_at(terms_of()))


def test_two_processes_do_not_share_the_files_of_an_aggregator(pair, tmp_path):
    """Each would draw noise of its own for the same sum."""
    with pytest.raises(StorageError, match="another aggregator runs here"):
        SumFiles(tmp_path / "0")


def test_what_was_told_to_the_other_aggregator_stays_true_or_nothing_is_released(pair, tmp_path):
    """A share that is gone when the process comes back changes a list that the other one knows."""
    terms = terms_of()
    pair.open(ROUND, terms)
    for seed, name in enumerate(COHORT):
        pair.share(ROUND, terms, name, seed)
    pair.stop(1)
    pair.trainer(0).close_sum(ROUND)
    assert eventually((tmp_path / "0" / "sums" / ROUND / "list").exists)
    pair.stop(0)
    (tmp_path / "0" / "uploads" / ROUND / COHORT[2]).unlink()
    for party in (0, 1):
        pair.start(party)
    pair.trainer(1).close_sum(ROUND)
    assert [one.phase for one in pair.wait(ROUND)] == ["failed", "failed"]
