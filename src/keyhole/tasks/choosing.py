"""How the clients of an arm choose keys, and what their examples say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keyhole.errors import InputError
from keyhole.keys.choice import Choice
from keyhole.keys.combined import always, with_negatives
from keyhole.keys.named import choice_named
from keyhole.keys.softmax import sampled_correction
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys
from keyhole.tasks.arms import Arm
from keyhole.tasks.task import Task

__all__ = ["choices_of", "localize_of"]

STRUCTURED = ("top", "random", "random-top")  # as many of a client's own keys as it may hold


def choices_of(arm: Arm, task: Task, own: Mapping[str, Choice]) -> dict[str, Choice]:
    """Returns the choice of each key space: what everybody has, what the arm names, what is drawn.

    Args:
        arm: names choices.
        task: says what everybody has.
        own: key space -> a choice in place of the one that the arm names.

    Raises:
        InputError: there is no such choice, a client could not hold what everybody has, or the arm
            draws words where there is no softmax or no own words to tell them from.
    """
    _check_negatives(arm, task)
    _check_always(arm, task)
    return {space: _choice(arm, task, space, own.get(space)) for space in arm.keys}


def localize_of(arm: Arm, task: Task) -> Callable[[Any, ClientKeys], Any]:
    """Returns the task's `localize`, with the correction of a sampled softmax where words are
    drawn."""
    if not arm.negatives:
        return task.localize
    assert task.outputs is not None
    name = task.outputs

    def localize(data: Any, keys: ClientKeys) -> Any:
        examples = task.localize(data, keys)
        (words,) = [z for z in ([keys] if isinstance(keys, Keys) else keys) if z.space.name == name]
        first = task.always.get(name, np.empty(0, np.int64)).tolist()
        own, correction = sampled_correction(
            words, task.count_keys(data)[name], arm.negatives, first
        )
        count = len(next(iter(examples.values())))
        return {
            **examples,
            "own": np.full(count, own, np.int32),
            "correction": np.full(count, correction, np.float32),
        }

    return localize


def _choice(arm: Arm, task: Task, space: str, own: Choice | None) -> Choice:
    choice, is_all = own or choice_named(arm.keys[space]), arm.keys[space] == "all"
    if space in task.always and not is_all:
        choice = always(task.always[space].tolist(), choice)
    if arm.negatives and space == task.outputs and not is_all:
        choice = with_negatives(choice, arm.negatives)
    return choice


def _check_negatives(arm: Arm, task: Task) -> None:
    if not arm.negatives:
        return
    if task.outputs is None:
        raise InputError(
            f"task {arm.task} has no softmax that is cut",
            got=f"negatives {arm.negatives}",
            allowed="0",
            fix="leave negatives out; so_word has them",
        )
    if arm.keys[task.outputs] not in STRUCTURED:
        raise InputError(
            f"negatives need own keys of {task.outputs!r} to tell them from",
            got=arm.keys[task.outputs],
            allowed=", ".join(STRUCTURED),
            fix="choose one of them, or leave negatives out",
        )


def _check_always(arm: Arm, task: Task) -> None:
    for space, first in task.always.items():
        m = arm.keys_per_client[space]
        if m is not None and m < len(first):
            raise InputError(
                f"a client cannot hold the keys of {space!r} that everybody has",
                got=f"{m} keys",
                allowed=f"{len(first)} or more",
                fix="raise keys per client",
            )
