"""The bytes of sealed requests and replies, opened by somebody else's HPKE."""

from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey

from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.prg import Prg
from keyhole.delivery.enclave.messages import EnclaveParams, open_request, seal_reply, seal_request

PARAMS = EnclaveParams(bytes(range(16)), bytes(range(32)), bytes(range(32, 64)), 37, 3, 4)
NONCE = bytes(range(100, 132))
PRIVATE = PrivateKey(bytes(range(32)))
RECORDS = np.arange(12, dtype=np.uint8).reshape(4, 3)


def messages(seed=bytes(16)):
    """A request for two keys, and the reply to it."""
    request, _ = seal_request(PRIVATE.public, PARAMS, NONCE, np.array([5, 36]), Prg(seed))
    _, context = open_request(PRIVATE, PARAMS, request)
    return request, seal_reply(context, PARAMS, NONCE, RECORDS, Prg(bytes(16)))


def head(number):
    return b"KHE1" + bytes([number, 0, 0, 0]) + PARAMS.round + PARAMS.digest + NONCE


def test_another_implementation_opens_request_and_reply():
    request, reply = messages()
    assert request[:88] == head(1)
    assert reply[:88] == head(2)
    suite = CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.AES128_GCM)
    private = KEMKey.from_pyca_cryptography_key(X25519PrivateKey.from_private_bytes(PRIVATE.secret))
    context = suite.create_recipient_context(request[88:120], private, info=head(1))
    keys = np.array([5, 36, -1, -1], "<i8").tobytes()
    assert context.open(request[120:], aad=head(1)) == keys
    derived = context.export(b"keyhole-enclave-v1 reply" + reply[88:104], 28)
    plain = AESGCM(derived[:16]).decrypt(derived[16:], reply[104:], head(2))
    assert plain == RECORDS.tobytes()


def test_the_bytes_of_both_messages_stay_as_they_are():
    request, reply = messages()
    assert sha256(request).hexdigest()[:16] == "99d93625b51e2e73"
    assert sha256(reply).hexdigest()[:16] == "cea669de47260074"


def test_no_two_requests_for_the_same_keys_are_alike():
    first, second = messages()[0], messages(b"x" * 16)[0]
    assert first[:88] == second[:88]
    assert not any(first[i : i + 8] == second[i : i + 8] for i in range(88, len(first) - 7))
