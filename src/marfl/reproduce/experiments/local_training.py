"""What peers train on: Moshpit-KD (Figure 2) beside as many steps without it, and IID against Dirichlet shards."""

from __future__ import annotations

from marfl.reproduce.cases import PAPER, TASKS, Bench, Case, Scale, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import NOTICEABLE, Mean, Number, above, accuracy, ratio

# --- Moshpit-KD ---

_WAYS = {  # as the legends call them
    "plain": "no MKD",
    "few": "MKD small K",
    "many": "MKD large K",
    "few matched": "steps of small K",
    "many matched": "steps of large K",
}


def _cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} {way}": simulated(_settings(bench) | _distilling(bench, way), bench.seeds)
        for bench in reversed(scale.benches)
        for way in _WAYS
    }


def _settings(bench: Bench) -> dict[str, object]:
    own = {"iterations": bench.distill_iterations, "target_accuracy": bench.target, "test_every": 5}
    return bench.settings(bench.distill_crowd) | PAPER | own


def _distilling(bench: Bench, way: str) -> dict[str, object]:
    if way == "plain":
        return {}
    count = bench.distilled[0 if way.startswith("few") else 1]
    return {"distill.iterations": count, "distill.match_local_steps": way.endswith("matched")}


def _to_target(task: str, way: str) -> Mean:
    return Mean(f"{task} {way}", "bytes_to_target")


def _numbers(task: str) -> dict[str, Number]:
    plain = _to_target(task, "plain")
    return {
        "plain": plain,
        "target": Mean(f"{task} plain", "target_accuracy"),
        "few": ratio(plain, _to_target(task, "few")),
        "many": ratio(plain, _to_target(task, "many")),
        "few_matched": ratio(plain, _to_target(task, "few matched")),
        "many_matched": ratio(plain, _to_target(task, "many matched")),
    }


def _less(values: Values, times: float) -> Judgement:
    best, matched = max(values["few"], values["many"]), max(values["few_matched"], values["many_matched"])
    ours = (
        "Without MKD {target:%} takes {plain:B}. That is {few:x} what it takes with MKD in few iterations and {many:x} "
        "what it takes with MKD in many; with the same number of local steps instead, and no MKD, it is "
        "{few_matched:x} and {many_matched:x}."
    )
    cheaper = (
        " A baseline that spends the same steps on its own labels, and sends nothing for it, does better at its best: "
        "what helps is the computing, not the distillation."
    )
    if values["few"] > values["few_matched"]:
        cheaper += " With few iterations it is the other way round."
    if best < times:
        reason = "MKD saves bytes, but not by that factor." if best > 1 else "MKD saves no bytes here."
        return Judgement(Word.REFUTED, ours, reason + (cheaper if matched > best else ""))
    if matched >= best:
        return Judgement(Word.REFINED, ours, f"The factor is right, but not the cause.{cheaper}")
    return Judgement(Word.CONFIRMED, ours, "It does better than the same number of local steps without distillation.")


def _twice(values: Values) -> Judgement:
    return _less(values, 2.0)


def _thrice(values: Values) -> Judgement:
    return _less(values, 2.5)


DISTILLATION = Experiment(
    "distillation",
    "Moshpit-KD: bytes to a target accuracy (Fig. 2 and appendix)",
    "Until the target accuracy is reached: without MKD, with MKD in the first few and in the first many iterations "
    "(the paper's small and large K), and beside each a baseline that takes as many local steps and distils nothing.",
    _cases,
    (
        Claim(
            "mkd-text", "Fig. 2, section 3.2",
            "With MKD, over 2× less communication is needed to reach 50 % on 20NG.",
            _numbers("text"), _twice,
        ),
        Claim(
            "mkd-vision", "Appendix",
            "On MNIST, MKD reaches 95 % with up to 3× lower communication.",
            _numbers("vision"), _thrice,
        ),
    ),
    tuple(
        Figure(
            f"distillation-{task}", "accuracy-bytes", "accuracy over bytes, with and without MKD",
            {f"{task} {way}": label for way, label in _WAYS.items()},
        )
        for task in TASKS
    ),
)  # fmt: skip


# --- IID against Dirichlet ---


def _heterogeneity_cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        found[f"{bench.name} dirichlet"] = simulated(bench.settings() | PAPER, bench.seeds)
        found[f"{bench.name} iid"] = simulated(bench.settings() | PAPER, bench.seeds, partition__kind="iid")
    return found


def _stable(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if abs(values["gap"]) < NOTICEABLE else Word.REFUTED,
        "Vision ends at {iid:%} on IID shards and at {dirichlet:%} on Dirichlet shards.",
        "One batch from every peer and an exact mean: each step sees nearly the whole distribution.",
    )


def _impaired(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["gap"] > NOTICEABLE else Word.REFUTED,
        "Text ends at {iid:%} on IID shards and at {dirichlet:%} on Dirichlet shards.",
        "With a common start and one batch each, the mean of the local steps is one step on the joint batch, whatever "
        "the split; a Dirichlet split changes only how often each sample is drawn, since small shards repeat sooner.",
    )


def _shards(task: str) -> dict[str, Number]:
    iid, dirichlet = f"{task} iid", f"{task} dirichlet"
    return {"iid": accuracy(iid), "dirichlet": accuracy(dirichlet), "gap": above(iid, dirichlet)}


HETEROGENEITY = Experiment(
    "heterogeneity",
    "IID against Dirichlet (appendix)",
    "The same training on shards drawn at random, and on shards with label shares from Dirichlet(1).",
    _heterogeneity_cases,
    (
        Claim(
            "iid-vision", "Appendix, heterogeneous peer data",
            "A Dirichlet split (α = 1) has no significant effect on MNIST.",
            _shards("vision"),
            _stable,
        ),
        Claim(
            "iid-text", "Appendix, heterogeneous peer data",
            "On 20NG performance is noticeably impaired against nearly IID shards.",
            _shards("text"),
            _impaired,
        ),
    ),
    tuple(
        Figure(
            f"heterogeneity-{task}", "accuracy-iterations", "IID and Dirichlet shards",
            {f"{task} iid": "MAR-FL on IID", f"{task} dirichlet": "MAR-FL on Dirichlet(1)"},
        )
        for task in TASKS
    ),
)  # fmt: skip
