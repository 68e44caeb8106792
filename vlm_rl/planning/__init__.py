"""What a run needs, whether a machine has it, and a recipe that fits: `--dry-run` and `vlm-rl init`.

    dry_run         what a run needs, before anything is loaded
    memory          the bytes of a rank, by formula
    fits            the one rule that says whether a run fits
    remedies        the settings that make a run smaller, and which of them make it fit
    page            the tables of a dry run
    out_of_memory   what to change where memory ran out
    init            write a recipe for a model, a set and a machine
    foreign_recipe  write a recipe from another trainer's file

Private to this room: foreign_files reads such a file, foreign_values converts it by the table of names, and
foreign_rows has a function for each row of the table that is more than a value.
"""

__all__ = ["dry_run", "fits", "foreign_recipe", "init", "memory", "out_of_memory", "page", "remedies"]
_USES = ["data", "learner", "model_files", "run"]
