"""Rollouts from servers of vLLM on this or other machines.

    servers       the sampler
    serve         start a server for a run
    schedule      which server samples which group; loads nothing
    scoring       a teacher's log-probs of given responses
    client        the connection to one server, and what it answers
    server_token  the file with the token that every route asks for
    timed_heads   connections that must say what they want in ten seconds
    gloo_link     weights over TCP, from host memory to host memory

Private to this room: fleet (which servers answer and hold the current weights), push (the weights to all of them),
sampling (the groups of a batch, from all of them), turns (episodes, turn by turn) and background (batches that are
sampled while others train).
"""

__all__ = ["client", "gloo_link", "schedule", "scoring", "serve", "server_token", "servers", "timed_heads"]
