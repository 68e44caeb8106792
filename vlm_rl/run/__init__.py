"""A run on disk and on the terminal.

    directory         read and write a run directory: the contract between training, report and demo
    configurations    a resume's against that of its run, and those of several ranks
    best              the best evaluated checkpoint, and how much lower the last one is
    difficulty        accuracy of problems by how often they were right at first
    stability         how steady a run was: evaluations that fall or waver, updates that jump
    rollout_row       a training response as it is stored
    eval_record       an evaluated response as it is stored
    turn_record       an episode as it is stored
    eval_result       a finished evaluation
    run_files         files written whole or not at all, tables as Parquet
    checkpoint        checkpoints that are complete or absent
    checkpoint_names  what a user may call a checkpoint
    export            a checkpoint as a model folder, here or on the hub
    manifest          what a checkpoint says of its files, and of the run that it resumes
    lock              one writer at a time in a run directory
    interrupts        Ctrl-C that is not lost: the first asks for a stop, the second stops at once
    writing           what the file system refuses, as a message
    run_log           log.txt: what rank 0 shows, with the time
    trackers          TensorBoard, wandb, trackio, MLflow and SwanLab behind one interface (a folder with a door)
    tracking          a process for each tracker, as a run starts and ends them
    cores             how many cores are allowed and free
    terminal          lines, progress bars and tables

Private to this room: plot (a run's curves as a figure, for notebooks) and mirror (the process that sends a run to one
tracker).
"""

__all__ = [
    "best",
    "checkpoint",
    "checkpoint_names",
    "configurations",
    "cores",
    "difficulty",
    "directory",
    "eval_record",
    "eval_result",
    "export",
    "interrupts",
    "lock",
    "manifest",
    "rollout_row",
    "run_files",
    "run_log",
    "stability",
    "terminal",
    "trackers",
    "tracking",
    "turn_record",
    "writing",
]
_USES = ["data", "model_files"]
