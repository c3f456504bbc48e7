"""Algorithm 2 of the paper in plain loops, beside its pseudocode. No keyhole in it: this is the
oracle.

The model is logistic regression over sparse binary features: x has one weight per feature, key k
selects x[k], and a client's keys are the features that occur in its examples. The fast paths of the
library are held to what this file computes.

Run it: python examples/algorithm2_by_hand.py
"""

import math
import random


def algorithm_2(client_update, server_update, num_rounds, x, sample, choose, psi, phi):
    """Federated model training with federated select; the comments are the paper's lines."""
    for t in range(num_rounds):  # for t = 1, ..., T
        total = [0.0] * len(x)
        cohort = sample(t)  # sample a subset S^t of available clients
        for client in cohort:  # for each client n in S^t, in parallel
            z = choose(client)  # choose select keys z_n = [z_n1, ..., z_nm]
            y = [psi(x, k) for k in z]  # receive y_n = [psi(x, z_n1), ..., psi(x, z_nm)]
            u = client_update(y, client, z)  # u_n = ClientUpdate(y_n, g_n)
            for i, value in enumerate(
                phi(u, z, len(x))
            ):  # server receives the mean of phi(u_n, z_n)
                total[i] += value
        mean = [value / len(cohort) for value in total]
        x = server_update(x, mean)  # x^{t+1} = ServerUpdate(x^t, u^t)
    return x


def algorithm_1(client_update, server_update, num_rounds, x, sample):
    """Federated model training: every client receives all of x."""
    everything = list(range(len(x)))
    return algorithm_2(
        client_update,
        server_update,
        num_rounds,
        x,
        sample,
        choose=lambda client: everything,
        psi=select_coordinate,
        phi=deselect_coordinates,
    )


def select_coordinate(x, k):
    """psi(x, k) = x_k."""
    return x[k]


def deselect_coordinates(u, z, size):
    """phi(u, z): zeros, with u added at z."""
    full = [0.0] * size
    for value, k in zip(u, z, strict=True):
        full[k] += value
    return full


def own_features(examples):
    """The features of a client's examples, ascending: structured select keys."""
    return sorted({feature for features, _ in examples for feature in features})


def sgd_client(learning_rate):
    """One epoch of SGD, one example a step, on logistic loss; the update is start minus end."""

    def client_update(y, examples, z):
        place = {k: i for i, k in enumerate(z)}
        start, y = list(y), list(y)
        for features, label in examples:
            score = sum(y[place[f]] for f in features)
            slope = 1.0 / (1.0 + math.exp(-score)) - label
            for f in features:
                y[place[f]] -= learning_rate * slope
        return [a - b for a, b in zip(start, y, strict=True)]

    return client_update


def sgd_server(learning_rate):
    """ServerUpdate(x, u) = x - eta u."""
    return lambda x, u: [a - learning_rate * b for a, b in zip(x, u, strict=True)]


def make_clients(num_clients, num_features, seed):
    """Clients with eight examples over a dozen features of their own; the truth is a sign per
    feature."""
    rng = random.Random(seed)
    sign = [rng.choice([-1, 1]) for _ in range(num_features)]
    clients = []
    for _ in range(num_clients):
        own = rng.sample(range(num_features), 12)
        examples = []
        for _ in range(8):
            features = sorted(rng.sample(own, 5))
            examples.append((features, int(sum(sign[f] for f in features) > 0)))
        clients.append(examples)
    return clients


def accuracy(x, clients):
    examples = [example for client in clients for example in client]
    right = sum((sum(x[f] for f in features) > 0) == label for features, label in examples)
    return right / len(examples)


def main():
    num_features, rounds = 200, 60
    clients = make_clients(80, num_features, seed=1)
    train, test = clients[:60], clients[60:]

    def sample(t):
        return random.Random(t).sample(train, 10)

    client, server, x = sgd_client(0.5), sgd_server(1.0), [0.0] * num_features
    full = algorithm_1(client, server, rounds, x, sample)
    sparse = algorithm_2(
        client, server, rounds, x, sample, own_features, select_coordinate, deselect_coordinates
    )
    largest = max(len(own_features(c)) for c in train)
    print(f"Algorithm 1: {accuracy(full, test):.1%} on unseen clients, {num_features} weights each")
    print(f"Algorithm 2: {accuracy(sparse, test):.1%} on unseen clients, {largest} weights at most")
    difference = max(abs(a - b) for a, b in zip(full, sparse, strict=True))
    print(f"largest difference between the two models: {difference}")


if __name__ == "__main__":
    main()
