"""Every experiment by name, the most important first: when time runs out, what is missing matters least."""

from __future__ import annotations

from marfl.reproduce.claims import Experiment
from marfl.reproduce.experiments import communication, data, distillation, ours, participation, privacy, small

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        communication.COMMUNICATION,
        participation.PARTICIPATION,
        ours.WIRELESS,
        distillation.DISTILLATION,
        data.EQUALITY,
        data.APPROXIMATE,
        privacy.PRIVACY,
        small.MIXING,
        small.CONTROL,
        small.STALL,
        ours.ANY_NUMBER,
        data.HETEROGENEITY,
    )
}
