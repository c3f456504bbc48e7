"""Blind signatures: the vector of RFC 9474, and what its signer sees."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import (
    RSAPrivateNumbers,
    RSAPublicNumbers,
    generate_private_key,
    rsa_crt_dmp1,
    rsa_crt_dmq1,
    rsa_crt_iqmp,
)

from keyhole.crypto.blind import BITS, BlindPublic, BlindSigner, blind
from keyhole.errors import MalformedError

# RFC 9474, appendix A.3 (RSABSSA-SHA384-PSS-Deterministic). Of what comes out, the first 32 bytes.
P = int(
    "e1f4d7a34802e27c7392a3cea32a262a34dc3691bd87f3f310dc756734889305"
    "59c120fd0410194fb8a0da55bd0b81227e843fdca6692ae80e5a5d414116d4803fca"
    "7d8c30eaaae57e44a1816ebb5c5b0606c536246c7f11985d731684150b63c9a3ad9e"
    "41b04c0b5b27cb188a692c84696b742a80d3cd00ab891f2457443dadfeba6d6daf10"
    "8602be26d7071803c67105a5426838e6889d77e8474b29244cefaf418e381b312048"
    "b457d73419213063c60ee7b0d81820165864fef93523c9635c22210956e53a8d9632"
    "2493ffc58d845368e2416e078e5bcb5d2fd68ae6acfa54f9627c42e84a9d3f277401"
    "7e32ebca06308a12ecc290c7cd1156dcccfb2311",
    16,
)
Q = int(
    "c601a9caea66dc3835827b539db9df6f6f5ae77244692780cd334a006ab353c8"
    "06426b60718c05245650821d39445d3ab591ed10a7339f15d83fe13f6a3dfb20b945"
    "2c6a9b42eaa62a68c970df3cadb2139f804ad8223d56108dfde30ba7d367e9b0a7a8"
    "0c4fdba2fd9dde6661fc73fc2947569d2029f2870fc02d8325acf28c9afa19ecf962"
    "daa7916e21afad09eb62fe9f1cf91b77dc879b7974b490d3ebd2e95426057f35d0a3"
    "c9f45f79ac727ab81a519a8b9285932d9b2e5ccd347e59f3f32ad9ca359115e7da00"
    "8ab7406707bd0e8e185a5ed8758b5ba266e8828f8d863ae133846304a2936ad7bc7c"
    "9803879d2fc4a28e69291d73dbd799f8bc238385",
    16,
)
INVERSE = int(
    "80682c48982407b489d53d1261b19ec8627d02b8cda5336750b8cee332ae26"
    "0de57b02d72609c1e0e9f28e2040fc65b6f02d56dbd6aa9af8fde656f70495dfb723"
    "ba01173d4707a12fddac628ca29f3e32340bd8f7ddb557cf819f6b01e445ad96f874"
    "ba235584ee71f6581f62d4f43bf03f910f6510deb85e8ef06c7f09d9794a008be7ff"
    "2529f0ebb69decef646387dc767b74939265fec0223aa6d84d2a8a1cc912d5ca25b4"
    "e144ab8f6ba054b54910176d5737a2cff011da431bd5f2a0d2d66b9e70b39f4b050e"
    "45c0d9c16f02deda9ddf2d00f3e4b01037d7029cd49c2d46a8e1fc2c0c17520af1f4"
    "b5e25ba396afc4cd60c494a4c426448b35b49635b337cfb08e7c22a39b256dd032c0"
    "0adddafb51a627f99a0e1704170ac1f1912e49d9db10ec04c19c58f420212973e0cb"
    "329524223a6aa56c7937c5dffdb5d966b6cd4cbc26f3201dd25c80960a1a111b3294"
    "7bb78973d269fac7f5186530930ed19f68507540eed9e1bab8b00f00d8ca09b3f099"
    "aae46180e04e3584bd7ca054df18a1504b89d1d1675d0966c4ae1407be325cdf623c"
    "f13ff13e4a28b594d59e3eadbadf6136eee7a59d6a444c9eb4e2198e8a974f27a39e"
    "b63af2c9af3870488b8adaad444674f512133ad80b9220e09158521614f1faadfe85"
    "05ef57b7df6813048603f0dd04f4280177a11380fbfc861dbcbd7418d62155248dad"
    "5fdec0991f",
    16,
)
MESSAGE = bytes.fromhex(
    "8f3dc6fb8c4a02f4d6352edf0907822c1210a9b32f9bdda4c45a698c80023a"
    "a6b59f8cfec5fdbb36331372ebefedae7d"
)
SALT = bytes.fromhex(
    "051722b35f458781397c3a671a7d3bd3096503940e4c4f1aaa269d60300ce"
    "449555cd7340100df9d46944c5356825abf"
)
SENT = "10c166c6a711e81c46f45b18e5873cc4f494f003180dd7f115585d871a289302"
ANSWER = "364f6a40dbfbc3bbb257943337eeff791a0f290898a6791283bba581d9eac90a"
SIGNATURE = "6fef8bf9bc182cd8cf7ce45c7dcf0e6f3e518ae48f06f3c670c649ac737a8b81"


@pytest.fixture(scope="module")
def signer():
    return BlindSigner(generate_private_key(65537, BITS))


def test_the_vector_of_the_rfc():
    d = pow(65537, -1, (P - 1) * (Q - 1))
    crt = rsa_crt_dmp1(d, P), rsa_crt_dmq1(d, Q), rsa_crt_iqmp(P, Q)
    key = RSAPrivateNumbers(P, Q, d, *crt, RSAPublicNumbers(65537, P * Q)).private_key()
    signer = BlindSigner(key)
    blinded = blind(signer.public, MESSAGE, salt=SALT, inverse=INVERSE)
    assert blinded.sent.hex().startswith(SENT)
    answer = signer.sign(blinded.sent)
    assert answer.hex().startswith(ANSWER)
    assert blinded.finish(answer).hex().startswith(SIGNATURE)


def test_what_comes_out_is_a_plain_signature_of_this_message_alone(signer):
    blinded = blind(signer.public, b"let me in")
    signature = blinded.finish(signer.sign(blinded.sent))
    public = BlindPublic.decode(signer.public.encoded)
    assert public.is_signed(b"let me in", signature)
    assert not public.is_signed(b"let me out", signature)
    assert not public.is_signed(b"let me in", bytes(len(signature)))


def test_what_the_signer_saw_fits_every_token_equally(signer):
    """For each (view, token) there is a factor that leads from one to the other: the signer, who
    has both lists and the key, cannot tell which belong together."""
    n, e = signer.public.numbers
    made = [blind(signer.public, b"%d" % number) for number in range(4)]
    answers = [signer.sign(one.sent) for one in made]
    tokens = [one.finish(answer) for one, answer in zip(made, answers, strict=True)]
    for one, answer in zip(made, answers, strict=True):
        for token in tokens:
            factor = int.from_bytes(answer) * pow(int.from_bytes(token), -1, n) % n
            encoded = pow(int.from_bytes(token), e, n)
            assert encoded * pow(factor, e, n) % n == int.from_bytes(one.sent)


def test_views_of_one_message_are_uniform(signer):
    """Bytes of what is sent for one message, over many times: each value as often as any other."""
    seen = b"".join(blind(signer.public, b"same").sent[8:] for _ in range(200))
    counts = np.bincount(np.frombuffer(seen, np.uint8), minlength=256)
    expected = len(seen) / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert 255 - 6 * np.sqrt(510) < chi < 255 + 6 * np.sqrt(510)


@pytest.mark.parametrize("sent", [b"", bytes(256), b"\xff" * 256, bytes(255)])
def test_what_is_no_number_below_the_modulus_is_refused(signer, sent):
    with pytest.raises(MalformedError):
        signer.sign(sent)


def test_a_signer_that_answers_something_else_is_found_out(signer):
    blinded = blind(signer.public, b"x")
    with pytest.raises(MalformedError, match="does not become"):
        blinded.finish(signer.sign(blind(signer.public, b"x").sent))
    with pytest.raises(MalformedError, match="of another kind"):
        BlindPublic.decode(BlindPublic(generate_private_key(65537, 1024).public_key()).encoded)
    with pytest.raises(MalformedError):
        BlindPublic.decode(b"nonsense")
