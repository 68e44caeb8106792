"""A room for programs that nobody has read: what a model writes runs here and nowhere else.

    program    one program, what it may take, and how it ended
    programs   run programs inside the walls, with limits, on a pool of launchers
    functions  call a function of such a program with inputs, and get its outputs as data

Private to this room: launcher (builds the walls, started as a program of its own), system_calls (the filter of system
calls), interpreter (which files Python needs), probe (proves each wall before the first program runs), calls (what
calls a function, inside the walls).
"""

__all__ = ["functions", "program", "programs"]
_USES = []
