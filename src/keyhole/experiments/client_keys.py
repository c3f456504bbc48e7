"""Chooses keys for the clients of a run, from what their examples say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keyhole.errors import InputError
from keyhole.experiments.task import Task
from keyhole.keys.choice import Choice
from keyhole.keys.structured import always, choice_named, sampled_correction, with_negatives
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.spec import RunSpec

STRUCTURED = ("top", "random", "random-top")  # as many of a client's own keys as it may hold


def choices_of(spec: RunSpec, task: Task, own: Mapping[str, Choice]) -> dict[str, Choice]:
    """Returns the choice of each key space: what everybody has, what is named, what is drawn.

    Args:
        own: key space -> a choice in place of the one that the record names.

    Raises:
        InputError: there is no such choice, a client could not hold what everybody has, or words
            are drawn where there is no softmax or no own words to tell them from.
    """
    _check_negatives(spec, task)
    _check_always(spec, task)
    return {space: _choice(spec, task, space, own.get(space)) for space in spec.keys}


def localize_of(spec: RunSpec, task: Task) -> Callable[[Any, KeysBySpace], Any]:
    """Returns the task's `localize`, with the correction of a sampled softmax where words are
    drawn."""
    if not spec.client.negatives:
        return task.localize
    assert task.outputs is not None
    name = task.outputs

    def localize(data: Any, keys: KeysBySpace) -> Any:
        examples = task.localize(data, keys)
        first = task.always.get(name, np.empty(0, np.int64)).tolist()
        own, correction = sampled_correction(
            keys[name], task.count_keys(data)[name], spec.client.negatives, first
        )
        count = len(next(iter(examples.values())))
        return {
            **examples,
            "own": np.full(count, own, np.int32),
            "correction": np.full(count, correction, np.float32),
        }

    return localize


def _choice(spec: RunSpec, task: Task, space: str, own: Choice | None) -> Choice:
    name = spec.keys[space].choice.name
    choice, is_all = own or choice_named(name), name == "all"
    if space in task.always and not is_all:
        choice = always(task.always[space].tolist(), choice)
    if spec.client.negatives and space == task.outputs and not is_all:
        choice = with_negatives(choice, spec.client.negatives)
    return choice


def _check_negatives(spec: RunSpec, task: Task) -> None:
    if not spec.client.negatives:
        return
    if task.outputs is None:
        raise InputError(
            f"task {spec.task} has no softmax that is cut: got negatives {spec.client.negatives}; "
            "expected 0; leave negatives out; so_word has them"
        )
    if spec.keys[task.outputs].choice.name not in STRUCTURED:
        raise InputError(
            f"negatives need own keys of {task.outputs!r} to tell them from: got "
            f"{spec.keys[task.outputs].choice}; expected {', '.join(STRUCTURED)}; choose one of "
            "them, or leave negatives out"
        )


def _check_always(spec: RunSpec, task: Task) -> None:
    for space, first in task.always.items():
        m = spec.keys[space].count
        if m is not None and m < len(first):
            raise InputError(
                f"a client cannot hold the keys of {space!r} that everybody has: got {m} keys; "
                f"expected {len(first)} or more; raise --m"
            )
