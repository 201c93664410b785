"""Real peers beside hivemind's own averager, on the machine that makes the page."""

from __future__ import annotations

from marfl.reproduce.cases import Case, Scale, calculated
from marfl.reproduce.claims import OURS, Claim, Experiment, Judgement, Values, Word
from marfl.reproduce.numbers import Mean, ratio

_RACE = "race"
_SIZES = {"quick": (2, 1_000, 2)}  # peers, parameters, averages; elsewhere:
_USUAL = (8, 1_200_000, 10)


def _cases(scale: Scale) -> dict[str, Case]:
    """Once for every seed that others have: nothing is drawn, but no two runs of real peers take as long."""
    peers, parameters, steps = _SIZES.get(scale.name, _USUAL)
    made = [
        calculated("beside_hivemind", peers=peers, parameters=parameters, steps=steps, repetition=seed)
        for seed in scale.text.seeds
    ]
    return {_RACE: Case(tuple(source for case in made for source in case.sources))}


def _quicker(values: Values) -> Judgement:
    kept = values["one_group"] >= 2 and values["pairs"] >= 5
    return Judgement(
        Word.CONFIRMED if kept else Word.REFUTED,
        "{peers:n} real peers with {parameters:n} parameters, all on one machine: hivemind's averager takes "
        "{one_group:x} our time in one group of all and {pairs:x} in rounds of pairs, at matchmaking times of "
        "{matchmaking_one_group:g} and {matchmaking_pairs:g} s, the shortest tried at which all groups always formed.",
        "Groups that follow from a roster need no search in every round; hivemind's peers wait that long for others.",
    )


REAL_RACE = Experiment(
    "real-race",
    "Real peers beside hivemind (ours)",
    "`marfl.Peer` and hivemind's `DecentralizedAverager`, one after the other on this machine, every peer a process of "
    "its own, over loopback; medians over some averages that all peers begin together. The seconds are the machine's, "
    "so only ratios are judged; a seed is a repetition of the whole.",
    _cases,
    (
        Claim(
            "hivemind", OURS,
            "Real peers average at least 2× as fast as hivemind's averager does in one group, and 5× as fast as in "
            "rounds of pairs.",
            {
                **{name: ratio(Mean(_RACE, name), Mean(_RACE, "ours")) for name in ("one_group", "pairs")},
                **{name: Mean(_RACE, f"arguments.{name}") for name in ("peers", "parameters")},
                **{name: Mean(_RACE, name) for name in ("matchmaking_one_group", "matchmaking_pairs")},
            },
            _quicker,
        ),
    ),
)  # fmt: skip
