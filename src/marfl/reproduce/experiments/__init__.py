"""Every experiment by name, ordered by importance for its price: when time runs out, the least important is missing."""

from __future__ import annotations

from marfl.reproduce.claims import Experiment
from marfl.reproduce.experiments import (
    averages,
    communication,
    differential_privacy,
    local_training,
    outer_steps,
    partial_participation,
    radio,
    real_race,
    single_records,
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        communication.COMMUNICATION,
        partial_participation.PARTICIPATION,
        communication.WIRELESS,
        radio.RADIO,
        outer_steps.OUTER_STEPS,
        real_race.REAL_RACE,
        averages.MIXING,
        communication.CONTROL,
        partial_participation.STALL,
        averages.ANY_NUMBER,
        averages.APPROXIMATE,
        local_training.DISTILLATION,
        differential_privacy.PRIVACY,
        single_records.RECORDS_HIDDEN,
        averages.EQUALITY,
        local_training.HETEROGENEITY,
    )
}
