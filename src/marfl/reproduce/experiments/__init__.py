"""Every experiment by name, the most important for its price first: when time runs out, the least is missing."""

from __future__ import annotations

from marfl.reproduce.claims import Experiment
from marfl.reproduce.experiments import communication, data, distillation, ours, participation, privacy, small

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        communication.COMMUNICATION,
        participation.PARTICIPATION,
        ours.WIRELESS,
        small.MIXING,
        small.CONTROL,
        small.STALL,
        ours.ANY_NUMBER,
        data.APPROXIMATE,
        distillation.DISTILLATION,
        privacy.PRIVACY,
        data.EQUALITY,
        data.HETEROGENEITY,
    )
}
