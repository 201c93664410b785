"""The paper's experiments, and ours, from runs to verdicts (MAR-FL, arXiv 2512.05234).

    cases                   which runs there are, and what the scales "quick", "laptop" and "paper" mean
    numbers                 what is taken from the summaries of runs
    claims, experiments/    what the paper says, and how our numbers judge it: plain data
    calculations            what needs no training
    shared                  a run whose models another run has already computed: only its ledger is its own
    archive                 finished runs on the disk, sealed; what was changed by hand is refused
    runner                  worker processes, in order of importance, with the time left
    publish, verdict_page   the verdicts for a reader, with figures, and for a program

A number reaches the page in one way only: from a summary, through `numbers`.
"""
