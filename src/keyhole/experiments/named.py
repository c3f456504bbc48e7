"""Lists the tasks by name."""

from __future__ import annotations

from keyhole.experiments.emnist import EMNIST_2NN, EMNIST_CNN, EXPERTS
from keyhole.experiments.movies import MOVIES
from keyhole.experiments.so_tag import SO_TAG
from keyhole.experiments.so_word import SO_WORD
from keyhole.experiments.specs import TASK
from keyhole.experiments.task import TaskKind
from keyhole.parts import pick

TASKS: dict[str, TaskKind] = {
    task.name: task for task in (SO_TAG, EMNIST_CNN, EMNIST_2NN, SO_WORD, EXPERTS, MOVIES)
}


def task_named(name: str) -> TaskKind:
    """Returns the task of that name, or your own that "module:NAME" names."""
    return pick(TASK, name, TASKS)
