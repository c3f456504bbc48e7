"""Chooses the keys of a client: by its data, at random, or both (section 4.1)."""

from keyhole.keys.budget import DeviceClass, assign_device, keys_within, share_of_keys
from keyhole.keys.choice import Choice, ClientContext, KeyContext, KeyCounts, choose_with
from keyhole.keys.sampled import (
    count_buckets,
    every,
    independent,
    nested,
    rolling,
    rolling_by,
    whole_buckets,
)
from keyhole.keys.structured import (
    CHOICES,
    always,
    choice_named,
    random_own,
    random_top,
    sampled_correction,
    top,
    with_negatives,
)

__all__ = [
    "CHOICES",
    "Choice",
    "ClientContext",
    "DeviceClass",
    "KeyContext",
    "KeyCounts",
    "always",
    "assign_device",
    "choice_named",
    "choose_with",
    "count_buckets",
    "every",
    "independent",
    "keys_within",
    "nested",
    "random_own",
    "random_top",
    "rolling",
    "rolling_by",
    "sampled_correction",
    "share_of_keys",
    "top",
    "whole_buckets",
    "with_negatives",
]
