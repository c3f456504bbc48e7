"""The experiments: tasks, arms, sweeps, and what runs them."""

from keyhole.tasks.arms import Arm, arm_of
from keyhole.tasks.experiment import Experiment
from keyhole.tasks.named import TASKS, task_named
from keyhole.tasks.sweeps import SWEEPS, Line, Sweep, sweep_named
from keyhole.tasks.task import Settings, Task, TaskKind
from keyhole.tasks.trial_directory import Result

__all__ = [
    "SWEEPS",
    "TASKS",
    "Arm",
    "Experiment",
    "Line",
    "Result",
    "Settings",
    "Sweep",
    "Task",
    "TaskKind",
    "arm_of",
    "sweep_named",
    "task_named",
]
