"""What the paper's text says, what its published code does, and what we take: the table of the verdict page.

Text: arXiv 2512.05234. Code: github.com/felix-fjm/mar-fl, as of commit eb7f830. Where they differ we take the text, and
a setting gives the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PaperSetting:
    """One setting: in the text, in the code, here, and why."""

    name: str
    text: str
    code: str
    ours: str
    why: str


SAME, NOT_SAID = "the same", "not said"

PAPER_SETTINGS = (
    PaperSetting(
        "MNIST", "a small CNN of two blocks, normalised as usual", "1→32→64 channels of 3×3, pool 2, 9216→128→10, no "
        "dropout; mean 0.1307, deviation 0.3081", "the same (`task_options.dropout = false`)",
        "the text gives no sizes; our task `mnist` has dropout by default",
    ),
    PaperSetting(
        "20NG", "a frozen DistilBERT, its CLS token, a small head; padded to a fixed length",
        "128 tokens; dropout 0.2, 768→72→20", "`paper`: the same; `laptop`: MiniLM, the mean of its tokens, 384→72→20",
        "MiniLM is what two cores can embed; no claim is refuted on it",
    ),
    PaperSetting(
        "split", "Dirichlet, α = 1.0", "each label dealt out in such shares, of the training and of the test set; "
        "i.i.d. is consecutive rows", "Dirichlet the same, at least one sample each; i.i.d. is drawn at random", "",
    ),
    PaperSetting("peers, groups, rounds", "16 = 4², 64 = 4³, 125 = 5³", SAME, SAME, ""),
    PaperSetting(
        "groups off the grid", "keys that never meet twice", "its own schedule", "peers sorted by key, cut in runs",
        "the text describes no schedule",
    ),
    PaperSetting(
        "local batches", "64 or 16 samples in an iteration: one batch", "settable; K follows from two", "one at 125 "
        "peers; `local_batches = 2` is the code's", "the text; `distillation` runs both",
    ),
    PaperSetting(
        "batches at 64 and 16 peers", NOT_SAID, "as many rows in all as at 125: MNIST 62 or 63 twice, 100 five times; "
        "20NG 15 or 16 twice, 25 five times", "the same (`global_batch`, `local_batches`)",
        "the code keeps N comparable",
    ),
    PaperSetting(
        "order of samples", "K is counted “without data loader shuffling”", "shuffled anew before every update; the "
        "last, smaller batch counts", "every sample once before any twice, all batches full", "the same in all engines",
    ),
    PaperSetting(
        "step size η", "0.1", "0.1; on 20NG a peer above 50 % goes on with 0.02", "0.1; `optimizer.slow_above = 0.5` "
        "is the code's", "the text; `distillation` runs both",
    ),
    PaperSetting("momentum μ", "0.9, damped", SAME, SAME, ""),
    PaperSetting(
        "who was absent", "Algorithm 1: starts from the global model; appendix: from the one it last obtained",
        "from its own", "*as published*: from its own; *ours*: catches up first", "Fig. 3 is about the former",
    ),
    PaperSetting(
        "participation 50 %, dropout 20 %", "in an entire iteration; after the update", "⌊N/2⌋; each lost by itself",
        "N/2, rounded; the same", "",
    ),
    PaperSetting(
        "accuracy", NOT_SAID, "mean over those who aggregated, each on its own shard of the test set; on i.i.d. shards "
        "the whole test set, of 20NG its first tenth",
        "the whole test set; of up to five models where peers differ; `test_on = shards` is the code's",
        "every sample counts alike, and the code's two splits are tested on different ones",
    ),
    PaperSetting(
        "tests", "every fifth iteration", "1, 6, 11, …", "5, 10, 15, … and the last; `laptop`, 20NG: every tenth", "",
    ),
    PaperSetting(
        "end of a run", NOT_SAID, "95 % or 50 % accuracy, no gain in 50 iterations, or 500 or 1000 iterations",
        "so many iterations (see the sizes); MKD: 95 % or 50 %", "curves of equal length can be compared",
    ),
    PaperSetting(
        "batches of an MKD round", "“each available local mini-batch”", "up to eight, drawn anew in every round",
        "up to eight whole ones, the same in all rounds of an iteration (`distill.batches`)",
        "at 125 peers that is the shard: 7 or 8 batches of MNIST, 5 or 6 of 20NG on average",
    ),
    PaperSetting("K", "8 and 40 on MNIST, 6 and 30 on 20NG", "fixed to these", SAME, ""),
    PaperSetting("ρ, τ, epochs, λ", "0.4, 3, 1, 1 − (t−1)/K", SAME, SAME, ""),
    PaperSetting("C₀", NOT_SAID, "0.1", "0.1", ""),
    PaperSetting(
        "σ", "varied", "1 by default; lowered in silence where too large", "see the sizes; refused where too large", "",
    ),
    PaperSetting(
        "β, η_u, η_C, γ, σ_b", "0.9, 0.1, 0.2, 0.5, n/20", "the same; the noised indicator is cut to 0 … 1",
        "mode `paper`: the text's; ours has no β and no η_u", "",
    ),
    PaperSetting("δ", NOT_SAID, "N^−1.1", SAME, ""),
    PaperSetting(
        "ε", NOT_SAID, "q²Tα/2σ² with the best α", "privacy loss distributions",
        "the formula is too low under sampling",
    ),
    PaperSetting("noise", "each its own", "all peers seeded alike", "each its own", "equal noise does not average out"),
    PaperSetting("seeds", NOT_SAID, "42", "0, 1, 2", ""),
)  # fmt: skip


def settings_table() -> Iterator[str]:
    """The table as Markdown."""
    yield "| setting | text | code | here | why |"
    yield "|---|---|---|---|---|"
    for row in PAPER_SETTINGS:
        yield f"| {row.name} | {row.text} | {row.code} | {row.ours} | {row.why} |"
