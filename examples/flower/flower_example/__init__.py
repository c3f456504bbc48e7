"""Federated select with a model and data of one's own, on devices that Flower calls."""
