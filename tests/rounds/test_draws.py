"""Draws of a run over a service: from a secret, of the declared sampler, and the same when asked
again."""

import stat
import threading

import numpy as np
import pytest

from keyhole.errors import InputError, StorageError
from keyhole.files import kept_secret
from keyhole.rounds.cohorts import SECRET_BYTES, Draws
from keyhole.sampling import Cohorts, sample_cohort

SECRET = bytes(range(32))
DRAWS = Draws("secret", SECRET)


def drawn(cohorts, rounds, draws=DRAWS):
    return [draws.cohort(cohorts, 0, 0, t) for t in range(rounds)]


def test_a_cohort_does_not_depend_on_the_seed_and_named_ones_on_nothing_else():
    cohorts = Cohorts(1000, 50)
    assert DRAWS.cohort(cohorts, 1, 0, 3) == DRAWS.cohort(cohorts, 2, 5, 3)
    assert DRAWS.cohort(cohorts, 1, 0, 3) != sample_cohort(cohorts, 1, 0, 3)
    assert DRAWS.cohort(cohorts, 1, 0, 3) != Draws("secret", bytes(32)).cohort(cohorts, 1, 0, 3)
    for kind in ("named", "simulated"):
        assert Draws(kind, SECRET).cohort(cohorts, 1, 0, 3) == sample_cohort(cohorts, 1, 0, 3)


def test_cohorts_of_a_fixed_size_hold_each_client_as_often():
    counts = np.zeros(20)
    for cohort in drawn(Cohorts(20, 5), 4000):
        assert len(set(cohort)) == len(cohort) == 5
        counts[list(cohort)] += 1
    # 1000 each, sd 27
    assert np.abs(counts - 1000).max() < 120


def test_poisson_cohorts_take_each_client_for_itself():
    sizes = [len(cohort) for cohort in drawn(Cohorts(200, 50, "poisson"), 1000)]
    # mean 50, variance 37.5: standard errors 0.19 and 1.7
    assert abs(np.mean(sizes) - 50) < 1
    assert abs(np.var(sizes) - 37.5) < 8
    assert DRAWS.cohort(Cohorts(7, 7, "poisson"), 0, 0, 0) == tuple(range(7))


def test_cyclic_cohorts_take_turns():
    found = drawn(Cohorts(12, 4, "cyclic"), 6)
    assert sorted(client for cohort in found[:3] for client in cohort) == list(range(12))
    assert found[3:] == found[:3]


def test_a_nonce_is_new_in_every_round_and_of_every_run():
    nonces = {DRAWS.nonce(t) for t in range(50)} | {Draws("named", bytes(32)).nonce(0)}
    assert len(nonces) == 51
    assert DRAWS.nonce(7) == Draws("named", SECRET).nonce(7)
    assert all(len(nonce) == 32 and int(nonce, 16) >= 0 for nonce in nonces)


def test_there_are_no_draws_without_a_secret():
    with pytest.raises(InputError, match="without its secret"):
        Draws("secret").cohort(Cohorts(5, 2), 0, 0, 0)


def test_a_secret_is_neither_shown_nor_compared():
    assert SECRET.hex() not in repr(DRAWS)
    assert "\\x00" not in repr(DRAWS)
    assert Draws("secret", bytes(32)) == DRAWS


def test_a_secret_is_kept_where_its_owner_alone_reads_it(tmp_path):
    path = tmp_path / "run" / "secret"
    made = kept_secret(path, SECRET_BYTES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(made) == SECRET_BYTES
    assert kept_secret(path, SECRET_BYTES) == made
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    assert kept_secret(tmp_path / "other", SECRET_BYTES) != made


def test_of_processes_that_come_at_once_all_get_the_same_secret(tmp_path):
    found, start = [], threading.Barrier(8)

    def take():
        start.wait()
        found.append(kept_secret(tmp_path / "secret", SECRET_BYTES))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_secret_that_was_cut_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(StorageError, match="holds no secret: got 5 bytes"):
        kept_secret(tmp_path / "secret", SECRET_BYTES)
