"""Algorithms by name: which optimizer and which client update belong together."""

import pytest

from keyhole.errors import InputError
from keyhole.rounds.algorithms import ALGORITHMS, algorithm_named
from keyhole.server.optimizers import SGD, Adagrad, Adam, Yogi

SERVERS = {"FedAvg": SGD, "FedProx": SGD, "FedAdagrad": Adagrad, "FedAdam": Adam, "FedYogi": Yogi}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_brings_its_optimizer_and_its_rates(name):
    algorithm = algorithm_named(name, client_lr=0.1, server_lr=0.5, batch_size=7)
    assert isinstance(algorithm.server, SERVERS[name])
    assert algorithm.server.lr == 0.5
    assert (algorithm.client.client_lr, algorithm.client.batch_size) == (0.1, 7)


def test_only_fed_prox_pulls_clients_back():
    pulls = {
        n: algorithm_named(n, client_lr=0.1, server_lr=1.0).client.proximal for n in ALGORITHMS
    }
    assert {name for name, pull in pulls.items() if pull > 0} == {"FedProx"}


def test_names_are_found_in_any_case():
    assert algorithm_named("fedadam", client_lr=1, server_lr=1) == algorithm_named(
        "FedAdam", client_lr=1, server_lr=1
    )


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match="got FedMagic; expected FedAvg, FedProx"):
        algorithm_named("FedMagic", client_lr=1)


@pytest.mark.parametrize(
    "rates", [{"client_lr": 0, "server_lr": 1}, {"client_lr": 1, "server_lr": 0}]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rates_of_zero_are_refused(name, rates):
    with pytest.raises(InputError, match="lr"):
        algorithm_named(name, **rates)
