"""What peers train on: Moshpit-KD (Figure 2) beside as many steps without it, and IID against Dirichlet shards."""

from __future__ import annotations

from marfl.reproduce.cases import PAPER, TASKS, Bench, Case, Scale, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import NOTICEABLE, Mean, Number, above, accuracy, ratio, to_target

# --- Moshpit-KD ---

_WAYS = {  # as the legends call them
    "plain": "no MKD",
    "few": "MKD small K",
    "many": "MKD large K",
    "few matched": "steps of small K",
    "many matched": "steps of large K",
}
_CODED = "coded"  # the text task once more, where the paper's code differs from its text
AS_CODED = {"local_batches": 2, "optimizer.slow_above": 0.5, "test_on": "shards"}
_PRICES = ("bytes", "steps", "seconds")


def _cases(scale: Scale) -> dict[str, Case]:
    found = {
        f"{bench.name} {way}": simulated(_settings(bench) | _distilling(bench, way), bench.seeds)
        for bench in reversed(scale.benches)
        for way in _WAYS
    }
    coded = _settings(scale.text) | AS_CODED
    return found | {
        f"{_CODED} {way}": simulated(coded | _distilling(scale.text, way), scale.text.seeds) for way in _WAYS
    }


def _settings(bench: Bench) -> dict[str, object]:
    own = {"iterations": bench.distill_iterations, "target_accuracy": bench.target, "links": "lte", "test_every": 5}
    return bench.settings() | PAPER | own


def _distilling(bench: Bench, way: str) -> dict[str, object]:
    """On every batch of a peer's shard, up to eight."""
    if way == "plain":
        return {}
    count = bench.distilled[0 if way.startswith("few") else 1]
    return {"distill.iterations": count, "distill.batches": 8, "distill.match_local_steps": way.endswith("matched")}


def _numbers(task: str) -> dict[str, Number]:
    """The prices of getting there without MKD; how many times fewer bytes other ways take, and how much else."""
    plain = f"{task} plain"
    found: dict[str, Number] = {"target": Mean(plain, "target_accuracy")}
    for what in _PRICES:
        found[f"plain_{what}"] = to_target(plain, what)
        for way in list(_WAYS)[1:]:
            name = f"{way.replace(' ', '_')}_{what}"
            there, here = to_target(plain, what), to_target(f"{task} {way}", what)
            found[name] = ratio(there, here) if what == "bytes" else ratio(here, there)
    return found


def _less(values: Values, times: float) -> Judgement:
    best = max(values["few_bytes"], values["many_bytes"])
    matched = max(values["few_matched_bytes"], values["many_matched_bytes"])
    ours = (
        "Without MKD {target:%} takes {plain_bytes:B}, {plain_steps:n} gradient steps of all peers together and "
        "{plain_seconds:s} over LTE. With MKD in few iterations: {few_bytes:x} fewer bytes, {few_steps:x} the steps, "
        "{few_seconds:x} the time; in many: {many_bytes:x} fewer bytes, {many_steps:x} the steps, {many_seconds:x} the "
        "time. With as many local steps instead, and no MKD: {few_matched_bytes:x} fewer bytes, {few_matched_steps:x} "
        "the steps, {few_matched_seconds:x} the time; {many_matched_bytes:x}, {many_matched_steps:x} and "
        "{many_matched_seconds:x}."
    )
    if best < times:
        reason = "MKD saves bytes, but not by that factor." if best > 1 else "MKD saves no bytes here."
        return Judgement(Word.REFUTED, ours, reason)
    if matched >= best:
        return Judgement(
            Word.REFINED,
            ours,
            "The factor holds, but the cause is the computing, not the teaching: peers that spend the same steps on "
            "their own labels, and send nothing for it, save more bytes.",
        )
    return Judgement(Word.CONFIRMED, ours, "It saves more than the same number of local steps without distillation.")


def _twice(values: Values) -> Judgement:
    return _less(values, 2.0)


def _thrice(values: Values) -> Judgement:
    return _less(values, 2.5)


DISTILLATION = Experiment(
    "distillation",
    "Moshpit-KD: what a target accuracy takes (Fig. 2 and appendix)",
    "Until the target accuracy is reached: without MKD, with MKD in the first few and in the first many iterations "
    "(the paper's small and large K), on all batches of a peer's shard, up to eight, in every round; and beside each a "
    "baseline that takes as many local steps and distils nothing. "
    "*Coded* is the text task with two local batches in an iteration and smaller steps of peers above the target, as "
    "the paper's code has it.",
    _cases,
    (
        Claim(
            "mkd-text", "Fig. 2, section 3.2",
            "With MKD, over 2× less communication is needed to reach 50 % on 20NG.",
            _numbers("text"), _twice,
        ),
        Claim(
            "mkd-text-coded", "Fig. 2, as the paper's code has it",
            "With MKD, over 2× less communication is needed to reach 50 % on 20NG (two local batches in an iteration).",
            _numbers(_CODED), _twice,
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
