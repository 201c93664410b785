"""Differential privacy against the noise multiplier: MAR-FL beside FedAvg, the paper's mode beside a sound one."""

from __future__ import annotations

from marfl.reproduce.cases import Case, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import EXACT, NOTICEABLE, PAPER, TASKS, above, accuracy
from marfl.reproduce.numbers import Mean, Ratio
from marfl.reproduce.scales import Scale

SHARE = 0.1  # of the peers, in the claim on sampling


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in reversed(scale.benches):
        settings = bench.settings()
        found[f"{bench.name} no noise"] = simulated(settings | EXACT, bench.seeds)
        for name, sigma in (("little", bench.noise[0]), ("much", bench.noise[1])):
            noise = {"privacy.noise_multiplier": sigma, "engine": "bitwise"}
            found[f"{bench.name} {name} noise"] = simulated(settings | EXACT | noise, bench.seeds)
            if bench.name == "text":
                found[f"{bench.name} fedavg {name} noise"] = simulated(
                    settings | EXACT | noise, bench.seeds[:1], technique="fedavg"
                )
                found[f"{bench.name} paper {name} noise"] = simulated(
                    settings | PAPER | noise | {"privacy.mode": "paper"}, bench.seeds[:1]
                )
    iterations = scale.text.iterations
    found["sampling"] = calculated("sampling", noise=1.0, share=SHARE, peers=125, iterations=iterations)
    return found


def _degrades(values: Values) -> Judgement:
    lower = values["epsilon_much"] < values["epsilon_little"]
    worse = values["much"] < values["little"] < values["none"] + NOTICEABLE
    return Judgement(
        Word.CONFIRMED if lower and worse else Word.REFUTED,
        "Text: {none:%} without noise, {little:%} with little (an outsider's ε is {epsilon_little:g}), {much:%} with "
        "much (ε {epsilon_much:g}). Vision: {vision_none:%}, {vision_little:%}, {vision_much:%}.",
        "The noise in the mean grows with σ·√P/n: a small head among many peers bears it, a large network does not.",
    )


def _alike(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if max(abs(values["little"]), abs(values["much"])) < NOTICEABLE else Word.REFUTED,
        "FedAvg under the same noise ends {little:pt} and {much:pt} above MAR on text.",
        "An exact mean of the same noised updates is the same mean, whoever computes it.",
    )


def _supported(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED,
        "With much noise an outsider's ε is {outsider:g}, that of a member of one's own group {insider:g}, "
        "{times:x} as much; the paper's mode ends at {paper:%}, ours at {sound:%}.",
        "The paper's ε holds for those who see nothing but the global model. Who shares a group sees single updates "
        "under a small share of the noise, unless sums are masked; and the paper's momentum travels without any noise, "
        "so its own mode satisfies no ε at all.",
    )


def _sampling(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED,
        "With a tenth of the peers in each iteration, the paper's formula gives an ε of {formula:g}; the exact account "
        "{secret:g} if nobody can tell who was sampled, and {public:g} for a peer of average luck when the roster is "
        "public, against {full:g} at full participation.",
        "A peer that is absent gives nothing away, so sampling does lower its ε. Amplification beyond that needs a "
        "secret sample; in a peer-to-peer system the roster is known, and the formula promises too much.",
    )


def _epsilon(case: str, observer: str = "outsider") -> Mean:
    return Mean(case, f"privacy.epsilon_{observer}")


PRIVACY = Experiment(
    "privacy",
    "Differential privacy (Fig. 4 and appendix)",
    "Sound mode (only a clipped and noised update travels) at two noise multipliers, FedAvg and the paper's Algorithm "
    "4 beside it.",
    _cases,
    (
        Claim(
            "noise", "Fig. 4, section 3.2",
            "Raising the noise multiplier reduces the privacy loss ε but eventually degrades utility.",
            {
                "none": accuracy("text no noise"), "little": accuracy("text little noise"),
                "much": accuracy("text much noise"), "epsilon_little": _epsilon("text little noise"),
                "epsilon_much": _epsilon("text much noise"), "vision_none": accuracy("vision no noise"),
                "vision_little": accuracy("vision little noise"), "vision_much": accuracy("vision much noise"),
            },
            _degrades,
        ),
        Claim(
            "noise-fedavg", "Fig. 4 and appendix",
            "DP has the same effect on MAR-FL as on FedAvg.",
            {name: above(f"text fedavg {name} noise", f"text {name} noise") for name in ("little", "much")},
            _alike,
        ),
        Claim(
            "noise-supported", "Section 3.2",
            "DP is readily supported within the fully decentralised system.",
            {
                "outsider": _epsilon("text much noise"), "insider": _epsilon("text much noise", "insider"),
                "times": Ratio(_epsilon("text much noise", "insider"), _epsilon("text much noise")),
                "paper": accuracy("text paper much noise"), "sound": accuracy("text much noise"),
            },
            _supported,
            cases=("text paper little noise",),
        ),
        Claim(
            "sampling", "Section 3.2",
            "The privacy loss ε can be substantially reduced by a lower peer-sampling rate.",
            {name: Mean("sampling", name) for name in ("full", "formula", "secret", "public")},
            _sampling,
        ),
    ),
    tuple(
        Figure(
            f"privacy-{task}", "accuracy-iterations", "Accuracy under noise",
            tuple(
                f"{task} {name}"
                for name in ("no noise", "little noise", "much noise", "paper little noise", "paper much noise")
                if task == "text" or not name.startswith("paper")
            ),
        )
        for task in TASKS
    ),
)  # fmt: skip
