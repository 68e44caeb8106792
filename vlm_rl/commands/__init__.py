"""The commands of `vlm-rl`: each adds its options beside the function that runs it.

    preparing         prepare, init, config, plan, doctor
    training          sft, train, serve, study, quickstart
    measuring         eval, with compare and export; score, grade
    reporting         report, demo, track, export
    papers            paper
    refusal           prints what a user did wrong, and ends all ranks alike
    examples          two of each command, for its help
    missing_library   says how to install what a command needs

Private to this room: real_quickstart, the runs of quickstart --real; shared, options and checks of several commands.
"""

__all__ = ["examples", "measuring", "missing_library", "papers", "preparing", "refusal", "reporting", "training"]
_USES = "every room"
