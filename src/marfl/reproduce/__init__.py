"""The paper's experiments, and ours, from runs to verdicts (MAR-FL, arXiv 2512.05234).

    scales                  what "quick", "laptop" and "paper" mean
    cases, numbers          which runs an experiment needs, and the numbers it takes from their summaries
    claims, experiments/    what the paper says, and how our numbers judge it: plain data
    calculations            what needs no training
    shared                  a run whose models another run has already computed: only its ledger is its own
    store                   finished runs on the disk, sealed; what was changed by hand is refused
    runner                  worker processes, in order of importance, with the time left
    figures, page           the verdicts for a reader

A number reaches the page in one way only: from a summary, through `numbers`.
"""
