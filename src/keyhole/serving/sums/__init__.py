"""Secure sums over the network: two aggregators, the devices that send shares, and the trainer."""
