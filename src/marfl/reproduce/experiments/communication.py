"""What travels: bytes of 16, 64 and 125 peers (Figure 1), the control plane, and time over wireless links."""

from __future__ import annotations

from marfl.reproduce.cases import DATA, EXACT, NAMES, PAPER, RIVALS, TASKS, Case, Crowd, Scale, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import Mean, Number, peers, ratio, sent, times

# --- bytes ---

SIZES = (16, 64, 125)
_LINES = {way: NAMES[way] for way in ("mar", *RIVALS)} | {"grid": "ours (grid)"}


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        for crowd in reversed(bench.sizes):  # the largest first: it says most
            settings = bench.settings(crowd, 0 if crowd == bench.sizes[-1] else bench.brief)
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
    return Judgement(
        Word.CONFIRMED if min(values["rdfl"], values["arfl"]) >= 9.5 else Word.REFUTED,
        "Among {peers:n} peers RDFL sends {rdfl:x} and AR-FL {arfl:x} what MAR-FL sends.",
        "Everybody sends to all others against a few groups of a few: the ratio follows from the plan, whatever the "
        "model.",
    )


def _growth(values: Values) -> Judgement:
    near = abs(values["mar"] / values["nlogn"] - 1) < 0.3 and abs(values["arfl"] / values["square"] - 1) < 0.1
    return Judgement(
        Word.CONFIRMED if near else Word.REFINED,
        "From {few:n} to {many:n} peers the bytes of an iteration grow {mar:x} with MAR-FL and {arfl:x} with AR-FL; "
        "N·log N grows {nlogn:x}, N² {square:x}.",
        "MAR-FL grows a little faster than N·log N, as its groups grow as well, to stay on a perfect grid. Our "
        "exchange `grid` grows {grid:x}: with N alone.",
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
        "Among {peers:n} peers a run of AR-FL has {ratio:x} the messages of one of MAR-FL.",
        "A peer meets a few others a few times, instead of everybody.",
    )


_GROW = ("mar", "arfl", "grid")


def _of_iteration(case: str) -> Number:
    """Bytes of all peers in one iteration."""
    return ratio(sent(case), Mean(case, "iterations"))


def _messages(case: str) -> Mean:
    return Mean(case, "messages_total")


COMMUNICATION = Experiment(
    "communication",
    "Communication and scalability (Fig. 1)",
    "The paper's four techniques as published (the model and its momentum travel), among three numbers of peers, and "
    "our exchange `grid` beside them. All average exactly here, so the four as published are trained once for each "
    "number of peers, and the bytes of every technique are computed apart.",
    _cases,
    (
        *(
            Claim(
                f"ten-times-{task}", "Fig. 1, sections 3.2 and 4",
                "On 125 peers MAR-FL needs up to 10× less communication than RDFL or AR-FL, for the same model "
                f"({data}).",
                {rival: times(f"{task} {rival} 125", f"{task} mar 125") for rival in ("rdfl", "arfl")}
                | {"peers": peers(f"{task} mar 125")},
                _ten_times,
            )
            for task, data in DATA.items()
        ),
        Claim(
            "growth", "Fig. 1, section 2.2",
            "MAR-FL's communication grows as O(N log N), that of RDFL and AR-FL as O(N²).",
            {
                **{way: ratio(_of_iteration(f"text {way} 125"), _of_iteration(f"text {way} 16")) for way in _GROW},
                "nlogn": Mean("growth", "nlogn"),
                "square": Mean("growth", "square"),
                "few": peers("text mar 16"),
                "many": peers("text mar 125"),
            },
            _growth,
        ),
        Claim(
            "price", "Limitations; ours: the price against FedAvg",
            "There is still a performance gap towards client-server FL (no number is given).",
            {
                "paper": times("text mar 125", "text fedavg 125"),
                "grid": times("text grid 125", "text exact fedavg 125"),
            },
            _price,
        ),
        Claim(
            "interactions", "Section 1",
            "MAR-FL reduces the number of interactions between peers.",
            {"ratio": ratio(_messages("text arfl 125"), _messages("text mar 125")), "peers": peers("text mar 125")},
            _interactions,
            cases=("text rdfl 125",),
        ),
    ),
    tuple(
        figure
        for task in TASKS
        for figure in (
            Figure(
                f"communication-{task}", "accuracy-bytes", "accuracy over bytes, on the largest number of peers",
                {f"{task} {way} 125": label for way, label in _LINES.items()},
            ),
            Figure(
                f"growth-{task}", "bytes-peers", "bytes of an iteration against the number of peers",
                {f"{task} {way} {size}": label for way, label in _LINES.items() for size in SIZES},
            ),
        )
    ),
)  # fmt: skip


# --- the control plane ---


def _control_cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} control": simulated(
            bench.settings(Crowd(16, 4)) | EXACT | {"engine": "protocol", "iterations": 5, "test_every": 5}, (0,)
        )
        for bench in scale.benches
    }


def _negligible(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if max(values.values()) < 0.01 else Word.REFINED,
        "Control messages are {vision:%} of all bytes on vision and {text:%} on text.",
        "It depends on the model: control costs the same for every model, so it shows where the model is small.",
    )


CONTROL = Experiment(
    "control",
    "The control plane (section 2.2)",
    "The real protocol on a virtual network, every header, roster and vote counted, among sixteen peers.",
    _control_cases,
    (
        Claim(
            "control", "Section 2.2",
            "The control plane's cost is negligible compared to model-exchange traffic.",
            {
                task: ratio(Mean(f"{task} control", "bytes_by_kind.control"), Mean(f"{task} control", "bytes_total"))
                for task in TASKS
            },
            _negligible,
        ),
    ),
)  # fmt: skip


# --- time over wireless links ---

PROFILES = ("wifi", "lte", "mixed")
_WAYS = {
    "paper mar": PAPER,
    "grid": EXACT,
    "fedavg": EXACT | {"technique": "fedavg"},
    "ring": EXACT | {"technique": "ring"},
    "rdfl": PAPER | {"technique": "rdfl"},
    "arfl": PAPER | {"technique": "arfl"},
}
_WIRELESS_LINES = {"paper mar": NAMES["mar"], "grid": "ours (grid)"} | {
    way: NAMES[way] for way in ("fedavg", "ring", "rdfl", "arfl")
}


def _wireless_cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} {way} {profile}": simulated(
            bench.settings(bench.sizes[-1]) | settings, bench.seeds, links=profile
        )
        for bench in scale.benches
        for profile in PROFILES
        for way, settings in _WAYS.items()
    }


def _time(case: str) -> Mean:
    return Mean(case, "virtual_seconds")


def _quicker(values: Values) -> Judgement:
    def over_all(name: str, spec: str) -> str:
        return ", ".join(f"{{{name}_{profile}:{spec}}}" for profile in PROFILES)

    return Judgement(
        Word.CONFIRMED if min(values[f"paper_{profile}"] for profile in PROFILES) > 1 else Word.REFINED,
        f"Over Wi-Fi, LTE and a mix of links the run takes {over_all('grid', 's')} with our exchange. MAR-FL as "
        f"published takes {over_all('paper', 'x')} that, FedAvg {over_all('fedavg', 'x')}, a ring all-reduce "
        f"{over_all('ring', 'x')}, AR-FL {over_all('arfl', 'x')}.",
        "The models after an iteration are the same for all, so these ratios hold on the way to any accuracy. Where "
        "the model is large, bytes decide; where it is small, the number of messages that must wait for one another "
        "does, which is what a ring has most of. FedAvg has a server in a data centre here, on a gigabit link.",
    )


def _times(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for profile in PROFILES:
        ours = _time(f"{task} grid {profile}")
        found[f"grid_{profile}"] = ours
        for name, way in (("paper", "paper mar"), ("fedavg", "fedavg"), ("ring", "ring"), ("arfl", "arfl")):
            found[f"{name}_{profile}"] = ratio(_time(f"{task} {way} {profile}"), ours)
    return found


WIRELESS = Experiment(
    "wireless",
    "Time over wireless links (ours)",
    "The runs of the largest crowd once more, with virtual time from the plan's own messages over links of typical "
    "rates, latencies and losses. Same models, so the time to an accuracy differs by the technique alone.",
    _wireless_cases,
    tuple(
        Claim(
            f"wireless-{task}", "ours",
            "Over wireless links MAR with the exchange `grid` reaches an accuracy sooner than MAR-FL as published "
            f"({data}).",
            _times(task), _quicker,
            cases=tuple(f"{task} rdfl {profile}" for profile in PROFILES),
        )
        for task, data in DATA.items()
    ),
    tuple(
        Figure(
            f"wireless-{profile}-{task}", "accuracy-time", f"accuracy over virtual time, links {profile}",
            {f"{task} {way} {profile}": label for way, label in _WIRELESS_LINES.items()},
        )
        for task in TASKS
        for profile in PROFILES
    ),
)  # fmt: skip
