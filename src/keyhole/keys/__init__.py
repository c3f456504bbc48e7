"""How a client chooses its keys."""

from keyhole.keys.buckets import count_buckets, whole_buckets
from keyhole.keys.budget import DeviceClass, assign_device, keys_within
from keyhole.keys.choice import Choice, choose_with
from keyhole.keys.combined import always, with_negatives
from keyhole.keys.counts import KeyCounts
from keyhole.keys.named import CHOICES, choice_named
from keyhole.keys.sampled import every, independent
from keyhole.keys.share import share_of_keys
from keyhole.keys.softmax import sampled_correction
from keyhole.keys.structured import random_own, random_top, top

__all__ = [
    "CHOICES",
    "Choice",
    "DeviceClass",
    "KeyCounts",
    "always",
    "assign_device",
    "choice_named",
    "choose_with",
    "count_buckets",
    "every",
    "independent",
    "keys_within",
    "random_own",
    "random_top",
    "sampled_correction",
    "share_of_keys",
    "top",
    "whole_buckets",
    "with_negatives",
]
