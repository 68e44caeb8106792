"""A room for programs that nobody has read: what a model writes runs here and nowhere else.

    program    one program, what it may take, and how it ended
    programs   run programs inside the walls, with limits, on a pool of launchers
    functions  call a function of such a program with inputs, and get its outputs as data
    limited    call a function of ours on what a stranger wrote, in a process with limits of its own

Private to this room: launcher (builds the walls, started as a program of its own), system_calls (the filter of system
calls), interpreter (which files Python needs), probe (proves each wall before the first program runs), calls (what
calls a function, inside the walls), limited_worker (what runs in the process of limited).
"""

__all__ = ["functions", "limited", "program", "programs"]
_USES = []
