"""Differential privacy against the noise multiplier: MAR-FL beside FedAvg, the paper's mode beside a sound one."""

from __future__ import annotations

from marfl.reproduce.cases import EXACT, PAPER, TASKS, Case, Scale, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import NOTICEABLE, Mean, Number, accuracy, peers, ratio

SHARE = 0.1  # of the peers, in the claim on sampling
_COMPARED = ("little", "much")  # noise under which techniques are compared
_LEVELS = (*_COMPARED, "extreme")


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in reversed(scale.benches):
        settings = bench.settings(iterations=bench.private)
        found[f"{bench.name} no noise"] = simulated(settings | EXACT, bench.seeds)
        for name, sigma in zip(_LEVELS, bench.noise, strict=True):
            noise = {"privacy.noise_multiplier": sigma, "engine": "bitwise"}
            found[f"{bench.name} {name} noise"] = simulated(settings | EXACT | noise, bench.seeds)
            if name not in _COMPARED:
                continue
            for technique in ("mar", "fedavg"):  # beside each other: the same seed, and the same noise
                found[f"{bench.name} {technique} {name} noise"] = simulated(
                    settings | EXACT | noise, bench.seeds, technique=technique
                )
            if bench.name == "text":
                found[f"{bench.name} paper {name} noise"] = simulated(
                    settings | PAPER | noise | {"privacy.mode": "paper"}, bench.seeds
                )
    iterations = scale.text.private or scale.text.iterations
    found["sampling"] = calculated("sampling", noise=1.0, share=SHARE, peers=125, iterations=iterations)
    return found


def _degrades(values: Values) -> Judgement:
    lower = values["epsilon_extreme"] < values["epsilon_much"] < values["epsilon_little"]
    worse = values["extreme"] < min(values["none"], values["little"], values["much"]) - NOTICEABLE
    return Judgement(
        Word.CONFIRMED if lower and worse else Word.REFUTED,
        "{none:%} without noise, {little:%} with σ = {sigma_little:g} (an outsider's ε is {epsilon_little:g}), "
        "{much:%} with σ = {sigma_much:g} (ε = {epsilon_much:g}), {extreme:%} with σ = {sigma_extreme:g} "
        "(ε = {epsilon_extreme:g}), among {peers:n} peers.",
        "The noise in the mean grows with σ·√P/n, for P parameters and n peers: a small head among many peers bears "
        "much of it, a large network does not. An ε that promises something has its price.",
    )


def _alike(values: Values) -> Judgement:
    worst = max(abs(values[f"fedavg_{name}"] - values[f"mar_{name}"]) for name in _COMPARED)
    return Judgement(
        Word.CONFIRMED if worst < NOTICEABLE else Word.REFUTED,
        "Under little noise FedAvg ends at {fedavg_little:%} and MAR at {mar_little:%}, under much at {fedavg_much:%} "
        "and {mar_much:%}: the same seed, each trained by itself.",
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


def _sigma(case: str) -> Mean:
    return Mean(case, "privacy.noise_multiplier")


def _lines(task: str) -> dict[str, str]:
    noises = [f"{name} noise" for name in _COMPARED]
    ours = {f"{task} {name} noise": f"ours {name} noise" for name in ("no", *_LEVELS)}
    fedavg = {f"{task} fedavg {noise}": f"FedAvg {noise}" for noise in noises}
    paper = {f"{task} paper {noise}": f"MAR-FL {noise}" for noise in noises if task == "text"}
    return ours | fedavg | paper


def _noised(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {"none": accuracy(f"{task} no noise"), "peers": peers(f"{task} no noise")}
    for name in _LEVELS:
        case = f"{task} {name} noise"
        found |= {name: accuracy(case), f"sigma_{name}": _sigma(case), f"epsilon_{name}": _epsilon(case)}
    return found


def _beside(task: str) -> dict[str, Number]:
    return {f"{who}_{name}": accuracy(f"{task} {who} {name} noise") for name in _COMPARED for who in ("mar", "fedavg")}


PRIVACY = Experiment(
    "privacy",
    "Differential privacy (Fig. 4 and appendix)",
    "Without noise and at three noise multipliers σ, little, much and extreme: our sound mode, in which nothing but a "
    "clipped and noised update travels; under the first two also FedAvg in the same mode, and on text the paper's own "
    "Algorithm 4 (MAR-FL).",
    _cases,
    (
        Claim(
            "noise", "Fig. 4, section 3.2",
            "Raising the noise multiplier σ reduces the privacy loss ε but eventually degrades model utility (20NG).",
            _noised("text"), _degrades,
        ),
        Claim(
            "noise-vision", "Appendix, differentially private training",
            "On MNIST, too, raising the noise multiplier σ eventually degrades training.",
            _noised("vision"), _degrades,
        ),
        Claim(
            "noise-fedavg", "Fig. 4",
            "DP has the same effect on MAR-FL as on FedAvg (20NG).",
            _beside("text"), _alike,
        ),
        Claim(
            "noise-fedavg-vision", "Appendix, differentially private training",
            "DP degrades MAR-FL as it degrades FedAvg (MNIST).",
            _beside("vision"), _alike,
        ),
        Claim(
            "noise-supported", "Section 3.2",
            "DP is readily supported within the fully decentralised system.",
            {
                "outsider": _epsilon("text much noise"), "insider": _epsilon("text much noise", "insider"),
                "times": ratio(_epsilon("text much noise", "insider"), _epsilon("text much noise")),
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
        Figure(f"privacy-{task}", "accuracy-iterations", "accuracy under noise", _lines(task)) for task in TASKS
    ),
)  # fmt: skip
