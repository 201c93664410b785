"""Figure 1: what 16, 64 and 125 peers send."""

from __future__ import annotations

from marfl.reproduce.cases import Case, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import EXACT, PAPER, RIVALS, TASKS, both, times
from marfl.reproduce.numbers import Mean, Ratio
from marfl.reproduce.scales import Scale

SIZES = (16, 64, 125)


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        for crowd in reversed(bench.sizes):  # the largest first: it says most
            settings = bench.settings(crowd)
            for technique in ("mar", *RIVALS):
                name = f"{bench.name} {technique} {crowd.peers}"
                found[name] = simulated(settings | PAPER, bench.seeds, technique=technique)
            found[f"{bench.name} grid {crowd.peers}"] = simulated(settings | EXACT, bench.seeds)
            found[f"{bench.name} exact fedavg {crowd.peers}"] = simulated(
                settings | EXACT, bench.seeds, technique="fedavg"
            )
    found["growth"] = calculated("growth", small=SIZES[0], large=SIZES[-1])
    return found


def _ten_times(values: Values) -> Judgement:
    least = min(values.values())
    return Judgement(
        Word.CONFIRMED if least >= 9.5 else Word.REFUTED,
        "RDFL sends {rdfl_vision:x} (vision) and {rdfl_text:x} (text) what MAR-FL sends, AR-FL {arfl_vision:x} and "
        "{arfl_text:x}, on the largest number of peers.",
        "Everybody sends to all others against a few groups of a few: the ratio follows from the plan, whatever the "
        "model.",
    )


def _growth(values: Values) -> Judgement:
    near = abs(values["mar"] / values["nlogn"] - 1) < 0.3 and abs(values["arfl"] / values["square"] - 1) < 0.1
    return Judgement(
        Word.CONFIRMED if near else Word.REFINED,
        "From the smallest to the largest crowd MAR-FL's bytes grow {mar:x} and AR-FL's {arfl:x}; N·log N grows "
        "{nlogn:x}, N² {square:x}.",
        "It holds where the group size follows the grid; our exchange `grid` grows {grid:x}, that is with N alone.",
    )


def _price(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED if values["grid"] < 1.05 else Word.CONFIRMED,
        "MAR-FL as published sends {paper:x} what FedAvg sends; with reduce-scatter down the rounds and all-gather "
        "back up (our exchange `grid`), and only updates travelling, {grid:x}.",
        "The gap is not a price of having no server: it comes from sending whole vectors to whole groups in every "
        "round.",
    )


def _interactions(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["ratio"] > 1 else Word.REFUTED,
        "A run of AR-FL has {ratio:x} the messages of one of MAR-FL.",
        "Groups of a few, a few times, instead of everybody.",
    )


def _messages(case: str) -> Mean:
    return Mean(case, "messages_total")


COMMUNICATION = Experiment(
    "communication",
    "Communication and scalability (Fig. 1)",
    "The paper's four techniques, as published (θ and m travel), on three numbers of peers, and our exchange beside "
    "them. All average exactly here, so each number of peers is trained once and the ledgers are computed apart.",
    _cases,
    (
        Claim(
            "ten-times", "Fig. 1, section 3.2",
            "On 125 peers MAR-FL needs up to 10× less communication than RDFL or AR-FL.",
            both("rdfl", ((task, times(f"{task} rdfl 125", f"{task} mar 125")) for task in TASKS))
            | both("arfl", ((task, times(f"{task} arfl 125", f"{task} mar 125")) for task in TASKS)),
            _ten_times,
        ),
        Claim(
            "growth", "Fig. 1, section 2.2",
            "MAR-FL's communication grows as O(N log N), that of RDFL and AR-FL as O(N²).",
            {
                "mar": times("text mar 125", "text mar 16"),
                "arfl": times("text arfl 125", "text arfl 16"),
                "grid": times("text grid 125", "text grid 16"),
                "nlogn": Mean("growth", "nlogn"),
                "square": Mean("growth", "square"),
            },
            _growth,
        ),
        Claim(
            "price", "Limitations; ours: the price against FedAvg",
            "There is still a gap towards client-server FL: MAR-FL sends several times what FedAvg sends.",
            {
                "paper": times("text mar 125", "text fedavg 125"),
                "grid": times("text grid 125", "text exact fedavg 125"),
            },
            _price,
        ),
        Claim(
            "interactions", "Section 1",
            "MAR-FL reduces the number of interactions between peers.",
            {"ratio": Ratio(_messages("text arfl 125"), _messages("text mar 125"))},
            _interactions,
            cases=("text rdfl 125",),
        ),
    ),
    tuple(
        figure
        for task in TASKS
        for figure in (
            Figure(
                f"communication-{task}", "accuracy-bytes", "Accuracy over bytes, on the largest number of peers",
                tuple(f"{task} {name} 125" for name in ("mar", *RIVALS, "grid")),
            ),
            Figure(
                f"growth-{task}", "bytes-peers", "Bytes of an iteration against the number of peers",
                tuple(f"{task} {name} {size}" for name in ("mar", *RIVALS, "grid") for size in SIZES),
            ),
        )
    ),
)  # fmt: skip
