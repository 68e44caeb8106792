"""Experiment trackers: a file each.

    registry  by name, and whether the library is installed
    tracker   what each is told, and the interface of all

Private to this room: tensorboard, wandb, trackio, mlflow and swanlab.
"""

__all__ = ["registry", "tracker"]
