"""The paper's experiments, and ours, from runs to verdicts (MAR-FL, arXiv 2512.05234).

    cases                   which runs there are, and what the scales "quick", "laptop" and "paper" mean
    numbers                 what is taken from the summaries of runs, with its interval over the seeds
    claims, experiments/    what the paper says, and how our numbers judge it: plain data, and the rules of a verdict
    calculations            what needs no training
    shared                  a run whose models another run has already computed: only its ledger is its own
    archive, kept           finished runs on the disk, sealed, and a small file of them that goes with the repository
    runner                  worker processes, in order of importance, with the time left
    publish, verdict_page   the verdicts for a reader, with figures, and for a program
    paper_settings          what the paper's text says, what its code does, what we take
    digest                  the verdicts in ten minutes: a page of lessons, and the README's table

A number reaches the page in one way only: from a summary, through `numbers`.
"""
