"""Trackers of runs: `kh.trackers.TensorBoard`, `MLflow`, `WandB`, and what your own must have."""

from keyhole.experiments.trackers import MLflow as MLflow
from keyhole.experiments.trackers import TensorBoard as TensorBoard
from keyhole.experiments.trackers import Tracker as Tracker
from keyhole.experiments.trackers import WandB as WandB
