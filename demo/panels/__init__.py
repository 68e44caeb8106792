"""The panels, each from the numbers to its HTML and charts.

    page_state      all that panels and exports draw from
    page_parts      header, notes, export
    summary_cards   a card for each checkpoint
    overview        who reasons longer, and does it pay
    lengths         charts of length
    problem         one problem, answer by answer
    reasoning       what is said after the right answer, moves, phrases
    table           a row per problem
    training        curves of runs

Private to this room: chart_cards and categories.
"""

__all__ = [
    "lengths",
    "overview",
    "page_parts",
    "page_state",
    "problem",
    "reasoning",
    "summary_cards",
    "table",
    "training",
]
