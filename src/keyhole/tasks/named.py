"""The tasks by name."""

from __future__ import annotations

from keyhole.errors import InputError
from keyhole.tasks.emnist_2nn import EMNIST_2NN
from keyhole.tasks.emnist_cnn import EMNIST_CNN
from keyhole.tasks.experts import EXPERTS
from keyhole.tasks.movies import MOVIES
from keyhole.tasks.so_tag import SO_TAG
from keyhole.tasks.so_word import SO_WORD
from keyhole.tasks.task import TaskKind

__all__ = ["TASKS", "task_named"]

TASKS: dict[str, TaskKind] = {
    task.name: task for task in (SO_TAG, EMNIST_CNN, EMNIST_2NN, SO_WORD, EXPERTS, MOVIES)
}


def task_named(name: str) -> TaskKind:
    """Returns the task of that name.

    Raises:
        InputError: there is no such task.
    """
    if name not in TASKS:
        raise InputError("no such task", got=name, allowed=", ".join(TASKS), fix="choose one")
    return TASKS[name]
