"""The parties of a secure sum, step by step, with all that they have said."""

from functools import cache

import numpy as np

from keyhole.aggregation.masked.client import SecAggClient, Secrets
from keyhole.aggregation.masked.messages import Identity, open_slots
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.server import SecAggServer
from keyhole.crypto.prg import Prg

ROUND = bytes(range(16))
STEPS = ("keys", "shares", "input", "confirmation", "unmasking")


def settings_of(cohort=4, length=3, **more):
    return SecAggParams(ROUND, cohort, length, **more)


def seeded(number):
    """A generator for one party of a test."""
    return Prg(b"secagg".ljust(12, b"\0") + number.to_bytes(4, "little"))


@cache
def vector_of(settings, place):
    """Ring elements that fill the ring, the same on every run."""
    drawn = Prg(b"vectors".ljust(12, b"\0") + place.to_bytes(4, "little"))
    data = drawn.bytes(settings.length * settings.dtype.itemsize)
    return np.frombuffer(data, settings.dtype)


def vectors_of(settings):
    return {place: vector_of(settings, place) for place in range(settings.cohort)}


def plain_sum(settings, places):
    """The sum in the ring by Python's integers: one entry after the other."""
    columns = zip(*(vector_of(settings, place).tolist() for place in places), strict=True)
    return np.array([sum(column) % 2**settings.bits for column in columns], settings.dtype)


class Parties:
    """A server and its clients.

    Args:
        settings: of the sum.
        invited: the places of clients that take part; all of them by default.
    """

    def __init__(self, settings, invited=None):
        self.settings = settings
        self.invited = list(range(settings.cohort) if invited is None else invited)
        identities = Identity.all_of(settings.cohort, seeded(999)) if settings.signed else None
        self.identities = identities
        self.server = SecAggServer(settings, identities[0].everyone if identities else None)
        self.clients = {
            place: SecAggClient(
                settings, place, seeded(place), identities[place] if identities else None
            )
            for place in self.invited
        }
        self.said = {}

    def secrets(self, place):
        """The secrets of a client, which its generator gives again."""
        return Secrets.draw(self.settings, place, seeded(place))

    def list_for(self, step, place):
        """What the server sends before a client's message of a step, or none."""
        signed = self.settings.signed
        lists = {
            "shares": self.server.key_list,
            "input": self.server.share_list,
            "confirmation": self.server.survivor_list,
            "unmasking": self.server.confirmation_list if signed else self.server.survivor_list,
        }
        return lists[step](place) if step in lists else None

    def answer(self, step, place, listed):
        """A client's message of a step."""
        client = self.clients[place]
        answers = {
            "keys": lambda _: client.advertise(),
            "shares": client.share,
            "input": lambda data: client.mask(data, vector_of(self.settings, place)),
            "confirmation": client.confirm,
            "unmasking": client.unmask,
        }
        return answers[step](listed)

    def receive(self, step, place, data):
        receivers = {
            "keys": self.server.receive_keys,
            "shares": self.server.receive_shares,
            "input": self.server.receive_input,
            "confirmation": self.server.receive_confirmation,
            "unmasking": self.server.receive_unmasking,
        }
        receivers[step](place, data)

    def say(self, step, places=None):
        """Makes the messages of one step."""
        for place in self.invited if places is None else places:
            listed = self.list_for(step, place)
            self.said[step, place] = self.answer(step, place, listed)

    def do(self, step, places=None):
        """One step of the clients at these places: everyone if none is named."""
        places = self.invited if places is None else list(places)
        self.say(step, places)
        for place in places:
            self.receive(step, place, self.said[step, place])

    def until(self, step):
        """All steps before this one, by everyone."""
        for earlier in STEPS[: STEPS.index(step)]:
            if earlier != "confirmation" or self.settings.signed:
                self.do(earlier)
        return self


def forgot_everything(client):
    """Whether a client has left and holds no secret and no share."""
    held = vars(client)
    return client.has_left and not (held["_secrets"] or held["_kept"] or held["_peers"])


def body_of(message):
    """What stands between a head of 60 bytes and a check of 16."""
    return message[60:-16]


def masked_of(parties, place):
    """A masked vector as a client has sent it."""
    return np.frombuffer(body_of(parties.said["input", place]), parties.settings.dtype).copy()


def shares_given(parties, owner, givers):
    """The shares of one client's secret that others gave to the server, by place of Shamir."""
    given = {}
    for giver in givers:
        slots = open_slots(parties.said["unmasking", giver], "unmasking", parties.settings, giver)
        given[giver + 1] = slots[owner]
    return given
