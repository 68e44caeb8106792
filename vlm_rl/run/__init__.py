"""A run on disk and on the terminal.

directory    read and write a run directory: the contract between training, report and demo
eval_record  the columns of an evaluation's records
checkpoint   checkpoints that are whole or not there
trackers     TensorBoard, trackio and wandb behind one interface
terminal     lines, progress bars and tables
"""

__all__ = ["checkpoint", "directory", "eval_record", "terminal", "trackers"]
