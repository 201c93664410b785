"""Moshpit-KD: knowledge distillation from the models of a peer's group, before the group averages.

Mulitze, Woisetschläger, Jacobsen 2025 (arXiv 2512.05234): Algorithm 2 (the student's steps) and Algorithm 3 (which
teachers it listens to). A round works on the groups of the averaging; whose model did not arrive is no candidate.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor
from torch.nn import functional

from marfl.errors import InputError
from marfl.learn.data import MiniBatch
from marfl.learn.task import LogitTask, evaluating, logit_obstacle
from marfl.learn.update import LocalResult, walk
from marfl.learn.worker import Worker
from marfl.settings import Distill, Optimizer
from marfl.state import all_finite

Epochs: TypeAlias = Sequence[Sequence[MiniBatch]]  # the same batches in every epoch, each with its own dropout masks


class Teachers(NamedTuple):
    """The chosen teachers, and what they say."""

    places: tuple[int, ...]  # positions among the candidates, the nearest first
    logits: tuple[Tensor, ...]  # z̄: their mean, for every batch


class Distilled(NamedTuple):
    """What a round of distillation came to."""

    result: LocalResult  # the student's state after it
    teachers: tuple[int, ...] = ()  # who taught: positions among the candidates
    loss: float = math.nan  # mean over the samples

    @property
    def undone(self) -> bool:
        """Whether the steps led to a NaN or an infinity, so that the student stayed as it was."""
        return bool(self.teachers) and math.isnan(self.loss)


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL(softmax(z/τ) ‖ softmax(s/τ)) of logits [rows, classes], the mean over the rows."""
    return functional.kl_div(
        functional.log_softmax(student / temperature, dim=1),
        functional.log_softmax(teacher / temperature, dim=1),
        reduction="batchmean",
        log_target=True,
    )


def student_loss(teacher: Tensor, student: Tensor, labels: Tensor, temperature: float, weight: float) -> Tensor:
    """L = λ·τ²·KL(teacher ‖ student) + (1−λ)·CE (Algorithm 2; Hinton et al. 2015)."""
    soft = temperature**2 * divergence(teacher, student, temperature)
    return weight * soft + (1 - weight) * functional.cross_entropy(student, labels)


def choose_teachers(
    worker: Worker, student: Tensor, candidates: Sequence[Tensor], minibatches: Sequence[MiniBatch], settings: Distill
) -> Teachers:
    """Algorithm 3: the ℓ candidates nearest to the student by softened KL on its own batches, in evaluation mode.

    Of two that are equally near, the first counts as nearer. A model that answers NaN teaches nobody.
    """
    own = _answers(worker, student, minibatches)
    answers = [_answers(worker, candidate, minibatches) for candidate in candidates]
    scores = [
        sum(divergence(z, s, settings.temperature).item() for z, s in zip(answer, own, strict=True))
        for answer in answers
    ]
    sane = [place for place, score in enumerate(scores) if math.isfinite(score)]
    chosen = sorted(sane, key=scores.__getitem__)[: settings.kept(len(candidates))]
    if not chosen:
        return Teachers((), ())
    return Teachers(tuple(chosen), tuple(_mean([answers[place][b] for place in chosen]) for b in range(len(own))))


def distill(
    worker: Worker,
    before: LocalResult,
    candidates: Sequence[Tensor],
    epochs: Epochs,
    settings: Distill,
    iteration: int,
    optimizer: Optimizer,
) -> Distilled:
    """Algorithm 2: one round of distillation, from the state `before` (left as it is) and the models of others.

    Without a teacher, or when the steps lead to a NaN or an infinity, the student stays as it is.
    """
    task = worker.task
    if (obstacle := logit_obstacle(task)) or not isinstance(task, LogitTask):
        raise InputError(f"distill: {obstacle}")
    if not candidates:
        return Distilled(before)
    student = before.theta
    teachers, logits = choose_teachers(worker, student, candidates, epochs[0], settings)
    if not teachers:
        return Distilled(before)
    weight = settings.weight(iteration)

    def loss_on(minibatch: MiniBatch, teacher: Tensor) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            answer = task.logits(worker.module, minibatch.batch)
            return student_loss(teacher, answer, task.labels(minibatch.batch), settings.temperature, weight)

        return loss

    steps = ((batch, loss_on(batch, z)) for epoch in epochs for batch, z in zip(epoch, logits, strict=True))
    after = replace(before, delta=before.delta.clone(), momentum=before.momentum.clone())
    worker.load(student)
    loss, samples = walk(worker, after, steps, optimizer)
    if not (math.isfinite(loss) and all_finite(after.delta) and all_finite(after.momentum)):
        return Distilled(before, teachers, math.nan)
    return Distilled(after, teachers, loss / samples)


def _answers(worker: Worker, theta: Tensor, minibatches: Sequence[MiniBatch]) -> list[Tensor]:
    """The logits of a model on every batch, in evaluation mode."""
    task = worker.task
    assert isinstance(task, LogitTask)
    worker.load(theta)
    with evaluating(worker.module):
        return [task.logits(worker.module, minibatch.batch) for minibatch in minibatches]


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Sequential adds: a stacked mean may round differently."""
    total = values[0].clone()
    for value in values[1:]:
        total.add_(value)
    return total.div_(len(values))


class GroupMeetings(Protocol):
    """The groups that a peer meets in one iteration, one group a round (`marfl.protocol.meetings`)."""

    rounds: int

    def mates(self, round: int) -> tuple[int, ...]:
        """The others in the peer's group, by rank; nobody in a round that it sits out."""

    async def show(self, round: int, vector: Tensor) -> list[Tensor]:
        """Show a model to the group; the models of the others that arrived in time."""


DistillRound: TypeAlias = Callable[[LocalResult, list[Tensor], int], Awaitable[LocalResult]]  # state, models, the round


async def distill_in_groups(meetings: GroupMeetings, before: LocalResult, study: DistillRound) -> LocalResult:
    """The peer's state after one round of distillation per meeting; a round without others changes nothing."""
    result = before
    for round in range(meetings.rounds):
        if meetings.mates(round):
            models = await meetings.show(round, result.theta)
            result = await study(result, models, round)
    return result
