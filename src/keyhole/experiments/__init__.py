"""Repeats the experiments of section 5 of the paper: tasks, trials, sweeps and their report.

This module is the catalogue, which finds tasks by their names. It imports them when it is asked: a
command reads its options before it loads JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole.identity import Ref
from keyhole.parts import pick

if TYPE_CHECKING:
    from keyhole.experiments.task import TaskKind

__all__ = ["all_tasks", "task_named"]


def all_tasks() -> dict[str, TaskKind]:
    """Returns every task that comes with keyhole, by its name."""
    from keyhole.experiments.emnist import EMNIST_2NN, EMNIST_CNN, EXPERTS
    from keyhole.experiments.movies import MOVIES
    from keyhole.experiments.so_tag import SO_TAG
    from keyhole.experiments.so_word import SO_WORD

    tasks = SO_TAG, EMNIST_CNN, EMNIST_2NN, SO_WORD, EXPERTS, MOVIES
    return {task.name: task for task in tasks}


def task_named(name: str) -> TaskKind:
    """Returns the task of that name, or your own that "module:NAME" names."""
    from keyhole.experiments.specs import TASK

    # Those that come with keyhole need JAX; your own may not.
    return pick(TASK, name, {} if Ref(name).is_own else all_tasks())
