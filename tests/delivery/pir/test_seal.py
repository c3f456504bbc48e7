"""Microsoft SEAL as an oracle: under our q and t its BFV says what our transforms and answers say.

Its Python bindings, seal-python, come with the extra `dev`. Without them these tests are skipped.
"""

import numpy as np
import pytest

from keyhole.crypto.ntt import transform_of
from keyhole.delivery.pir.one_server import OneServerClient, params_of, server_of
from keyhole.delivery.pir.shape import DIMENSION, MODULUS, PRIMES, RingShape, plain_modulus
from keyhole.delivery.pir.slots import mask_of, slots_of
from tests.crypto.test_ntt import drawn, multiplied
from tests.delivery.pir.schemes import database_of, records_of, seeded

seal = pytest.importorskip("seal", reason="the oracle, seal-python, is not installed")


class Bfv:
    """SEAL's BFV with numbers of ours."""

    def __init__(self, degree, modulus):
        params = seal.EncryptionParameters(seal.scheme_type.bfv)
        params.set_poly_modulus_degree(degree)
        # The last prime is for switching keys: ciphertexts have the others.
        spare = seal.CoeffModulus.Create(degree, [60])
        params.set_coeff_modulus([*(seal.Modulus(prime) for prime in PRIMES), *spare])
        params.set_plain_modulus(modulus)
        context = seal.SEALContext(params, True, seal.sec_level_type.none)
        assert context.parameters_set()
        key = seal.KeyGenerator(context).secret_key()
        self._encryptor, self._decryptor = (
            seal.Encryptor(context, key),
            seal.Decryptor(context, key),
        )
        self._evaluator, self._degree = seal.Evaluator(context), degree

    def products(self, pairs):
        """The sum of products of polynomials, (N, 1) each, of which SEAL encrypts the first."""
        total = None
        for one, other in pairs:
            secret = self._encryptor.encrypt_symmetric(seal.Plaintext(written(one)))
            product = self._evaluator.multiply_plain(secret, seal.Plaintext(written(other)))
            total = product if total is None else self._evaluator.add(total, product)
        return read(self._decryptor.decrypt(total).to_string(), self._degree)


def written(column):
    """A polynomial as SEAL writes it: "2Ax^2 + 1x^1 + 3"."""
    terms = [(f"{int(x):X}", k) for k, x in enumerate(column[:, 0]) if x]
    return " + ".join(x if k == 0 else f"{x}x^{k}" for x, k in reversed(terms)) or "0"


def read(text, degree):
    out = np.zeros((degree, 1), np.uint32)
    for term in text.split(" + "):
        number, _, power = term.partition("x^")
        out[int(power or 0), 0] = int(number, 16)
    return out


@pytest.mark.parametrize("degree", [256, 1024, 2048])
@pytest.mark.parametrize("bits", [16, 20])
def test_products_are_those_of_seal(degree, bits):
    modulus = plain_modulus(bits)
    one, other = drawn(3, 2, degree, 1, below=modulus)
    said = Bfv(degree, modulus).products([(one, other)])
    np.testing.assert_array_equal(said, multiplied(transform_of(degree, modulus), one, other))


def test_an_answer_is_that_of_bfv():
    """Positions of buckets encrypted, multiplied with the first chunk of what lies in them, added
    up and decrypted: wanted slots hold what our own server and client find there."""
    database = database_of(records_of(3000, 40), 20)
    params, server = params_of(database), server_of(database)
    shape, keys = RingShape.of(params), np.array([5, 1700, 2999])
    assert (shape.pieces, shape.groups) == (1, 1)
    assert shape.positions > 30
    first = database.rows[:, 0] ^ mask_of(np.arange(3000), shape.row_words)[:, 0]
    chunks = (first & np.uint64((1 << shape.chunk_bits) - 1)).astype(np.uint32)
    ring = transform_of(shape.degree, shape.modulus)
    buckets, positions = slots_of(shape).assign(keys)

    def pairs():
        for p, members in enumerate(slots_of(shape).members(0, shape.positions)):
            wanted = np.zeros((shape.degree, 1), np.uint32)
            wanted[buckets[positions == p]] = 1
            held = np.where(members < 0, 0, chunks[members]).astype(np.uint32)[:, None]
            yield ring.inverse(wanted), ring.inverse(held)

    said = ring.forward(Bfv(shape.degree, shape.modulus).products(pairs()))
    np.testing.assert_array_equal(said[buckets[:, 0], 0], chunks[keys])
    question = OneServerClient(params, server.hint).query(keys, seeded(3))
    found = question.decode(server.answer(question.messages()))
    ours = np.ascontiguousarray(found.records[:, :8]).view("<u8")[:, 0]
    np.testing.assert_array_equal(ours, database.rows[keys, 0])


def test_the_modulus_is_no_wider_than_seal_allows_for_128_bits():
    """By the homomorphic encryption standard, for ternary secrets, which are narrower."""
    assert MODULUS.bit_length() <= seal.CoeffModulus.MaxBitCount(DIMENSION) == 54
    assert seal.CoeffModulus.MaxBitCount(DIMENSION // 2) < 54
