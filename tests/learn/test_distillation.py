"""Moshpit-KD against the paper's Algorithms 2 and 3 written out plainly, with one model object per peer."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from marfl.config import load
from marfl.errors import InputError
from marfl.from_config import local_work_of, technique_of
from marfl.learn import (
    ClassificationTask,
    Distill,
    Loader,
    LocalResult,
    LocalWork,
    MiniBatch,
    Optimizer,
    Worker,
    initial_model,
    load_task,
    shard_of,
)
from marfl.learn import distill as distill_round
from marfl.learn.data import row_keys
from marfl.learn.distillation import choose_teachers, student_loss
from marfl.learn.local_work import Start
from marfl.learn.models import SeededDropout, dropout_context
from marfl.learn.task import logit_obstacle
from marfl.plan.grid import order, plan
from marfl.sim.engine import Simulation
from marfl.state import flatten

OPTIMIZER = Optimizer(learning_rate=0.2, decay=0.7)


class Toy(ClassificationTask):
    """Four inputs, three classes, dropout in between."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), SeededDropout(self.dropout), nn.Linear(8, 3))

    def test_set(self) -> Dataset[Any]:
        return TensorDataset(*data(8).batch)


def data(rows: int, seed: int = 0, step: int = 0) -> MiniBatch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return MiniBatch((inputs, labels), row_keys(0, seed, 0, step, rows))


def worker_and_models(count: int, dropout: float = 0.0) -> tuple[Worker, list[Tensor]]:
    torch.manual_seed(5)
    task = Toy(dropout)
    worker = Worker(task, task.model())
    return worker, [worker.flat + 0.5 * torch.randn_like(worker.flat) for _ in range(count)]


def student_at(theta: Tensor) -> LocalResult:
    """A student some steps away from θ^{t−1}, with momentum."""
    torch.manual_seed(6)
    return LocalResult(theta, 0.1 * torch.randn_like(theta), 0.1 * torch.randn_like(theta), 0.0, 0, True)


# --- the algorithms, written out ---


@dataclass
class Pupil:
    """A peer of the restatement: a model of its own, and the momentum of each parameter."""

    model: nn.Module
    momentum: dict[str, Tensor]

    @classmethod
    def of(cls, template: nn.Module, theta: Tensor, momentum: Tensor) -> Pupil:
        model, parts, place = copy.deepcopy(template), {}, 0
        for name, parameter in model.named_parameters():
            size = parameter.numel()
            parameter.data = theta[place : place + size].view(parameter.shape).clone()
            parts[name] = momentum[place : place + size].view(parameter.shape).clone()
            parameter.grad = None
            place += size
        return cls(model, parts)

    def step(self, loss: Tensor, learning_rate: float, decay: float) -> None:
        named = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()))
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
            self.momentum[name] = decay * self.momentum[name] + (1 - decay) * gradient
            parameter.data = parameter.data - learning_rate * self.momentum[name]


def plain_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Σ p·log(p/q) over the classes, the mean over the rows."""
    p = torch.exp(teacher / temperature) / torch.exp(teacher / temperature).sum(dim=1, keepdim=True)
    q = torch.exp(student / temperature) / torch.exp(student / temperature).sum(dim=1, keepdim=True)
    return (p * torch.log(p / q)).sum(dim=1).mean()


def teacher_selection(
    student: nn.Module, candidates: list[nn.Module], batches: list[Any], settings: Distill
) -> tuple[list[int], list[Tensor]]:
    """Algorithm 3, line by line; z̄ of Algorithm 2 with it."""
    for model in (student, *candidates):
        model.eval()
    with torch.no_grad():
        s = [student(inputs) for inputs, _ in batches]
        z = [[candidate(inputs) for inputs, _ in batches] for candidate in candidates]
        scores = [
            sum(float(plain_kl(z[c][b], s[b], settings.temperature)) for b in range(len(batches)))
            for c in range(len(candidates))
        ]
    kept = max(1, int(settings.keep * len(candidates)))
    top = sorted(range(len(candidates)), key=lambda c: scores[c])[:kept]
    return top, [sum((z[c][b] for c in top[1:]), z[top[0]][b]) / kept for b in range(len(batches))]


def moshpit_kd(
    pupil: Pupil, candidates: list[nn.Module], epochs: list[list[MiniBatch]], settings: Distill, iteration: int,
    optimizer: Optimizer,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """Algorithm 2, line by line, in place; the teachers and the loss of every step."""
    batches = [minibatch.batch for minibatch in epochs[0]]
    top, mean_logits = teacher_selection(pupil.model, candidates, batches, settings)
    pupil.model.train()
    weight = max(0.0, 1 - (iteration - 1) / settings.iterations)
    losses = []
    for epoch in epochs:
        for minibatch, teacher in zip(epoch, mean_logits, strict=True):
            inputs, labels = minibatch.batch
            with dropout_context(minibatch.keys):
                answer = pupil.model(inputs)
            soft = settings.temperature**2 * plain_kl(teacher, answer, settings.temperature)
            hard = -torch.log_softmax(answer, dim=1)[torch.arange(len(labels)), labels].mean()
            loss = weight * soft + (1 - weight) * hard
            losses.append(loss.item())
            pupil.step(loss, optimizer.learning_rate, optimizer.decay)
    return top, losses


# --- one round ---


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["without dropout", "with dropout"])
@pytest.mark.parametrize(("iteration", "keep", "epochs", "batches"), [(1, 0.4, 1, 1), (3, 0.5, 2, 3), (6, 1.0, 1, 2)])
def test_a_round_chooses_the_teachers_and_makes_the_steps_of_the_paper(iteration, keep, epochs, batches, dropout):
    settings = Distill(6, keep=keep, epochs=epochs, batches=batches)
    worker, models = worker_and_models(6, dropout)
    lessons = [[data(5, b, 10 * e + b) for b in range(batches)] for e in range(epochs)]
    before = student_at(models[0])
    kept = before.delta.clone(), before.momentum.clone()
    lesson = distill_round(worker, before, models[1:], lessons, settings, iteration, OPTIMIZER)

    pupil = Pupil.of(worker.module, before.theta, before.momentum)
    candidates = [Pupil.of(worker.module, model, model).model for model in models[1:]]
    top, losses = moshpit_kd(pupil, candidates, lessons, settings, iteration, OPTIMIZER)
    assert list(lesson.teachers) == top
    assert len(top) == max(1, math.floor(keep * 5))
    assert lesson.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    after, momentum = flatten(pupil.model), torch.cat([part.flatten() for part in pupil.momentum.values()])
    torch.testing.assert_close(lesson.result.theta, after, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lesson.result.momentum, momentum, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(after, before.theta, atol=1e-3)  # the round did something
    assert torch.equal(before.delta, kept[0])
    assert torch.equal(before.momentum, kept[1])


def test_the_gradient_of_the_student_loss_is_the_one_worked_out_by_hand():
    torch.manual_seed(0)
    teacher, student, labels = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1])
    student_loss(teacher, student, labels, temperature=3.0, weight=0.7).backward()
    gap = torch.softmax(student / 3, dim=1) - torch.softmax(teacher / 3, dim=1)  # of KL by s: gap / τ
    right = torch.nn.functional.one_hot(labels, 3)
    by_hand = (0.7 * 9 * gap / 3 + 0.3 * (torch.softmax(student, dim=1) - right)) / 4
    torch.testing.assert_close(student.grad, by_hand.detach())


def test_the_loss_is_that_of_the_teachers_at_first_and_cross_entropy_in_the_end():
    torch.manual_seed(0)
    teacher, student, labels = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    settings = Distill(8)
    weights = [settings.weight(t) for t in (1, 2, 8, 9, 20)]
    assert weights == pytest.approx([1.0, 7 / 8, 1 / 8, 0.0, 0.0])
    assert [settings.active(t) for t in (0, 1, 8, 9)] == [False, True, True, False]
    first = student_loss(teacher, student, labels, 3.0, weights[0])
    assert float(first) == pytest.approx(9 * float(plain_kl(teacher, student, 3.0)), rel=1e-5)
    last = student_loss(teacher, student, labels, 3.0, weights[-1])
    torch.testing.assert_close(last, torch.nn.functional.cross_entropy(student, labels))


@pytest.mark.parametrize(
    ("keep", "candidates", "kept"), [(0.4, 1, 1), (0.4, 4, 1), (0.4, 5, 2), (0.5, 4, 2), (1, 3, 3)]
)
def test_at_least_one_teacher_and_at_most_the_share_is_kept(keep, candidates, kept):
    assert Distill(1, keep=keep).kept(candidates) == kept


def test_dropout_is_off_while_teachers_are_compared():
    worker, models = worker_and_models(4, dropout=0.5)
    lessons = [data(6)]
    first = choose_teachers(worker, models[0], models[1:], lessons, Distill(1, keep=1.0))
    other_masks = [replace(lessons[0], keys=row_keys(9, 9, 9, 9, 6))]
    again = choose_teachers(worker, models[0], models[1:], other_masks, Distill(1, keep=1.0))
    assert first.places == again.places
    assert torch.equal(first.logits[0], again.logits[0])
    assert worker.module.training


def test_a_student_is_its_own_nearest_teacher():
    worker, models = worker_and_models(3)
    chosen = choose_teachers(worker, models[1], models, [data(6)], Distill(1))
    assert chosen.places == (1,)


def test_without_a_candidate_the_student_stays_as_it_is():
    worker, models = worker_and_models(1)
    before = student_at(models[0])
    assert distill_round(worker, before, [], [[data(5)]], Distill(3), 1, OPTIMIZER).result is before


def test_a_model_that_answers_nan_teaches_nobody():
    worker, models = worker_and_models(4)
    broken = torch.full_like(models[0], 3e38)
    before = student_at(models[0])
    lesson = distill_round(worker, before, [broken, *models[1:]], [[data(5)]], Distill(3, keep=1.0), 1, OPTIMIZER)
    assert sorted(lesson.teachers) == [1, 2, 3]
    alone = distill_round(worker, before, [broken], [[data(5)]], Distill(3), 1, OPTIMIZER)
    assert alone.result is before


def test_steps_that_lead_to_infinity_are_undone():
    worker, models = worker_and_models(2)
    before = student_at(models[0])
    lesson = distill_round(worker, before, models[1:], [[data(5)]] * 3, Distill(3), 1, Optimizer(3e38, 0.0))
    assert lesson.undone
    assert lesson.result is before


class OwnLoss(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def test_a_task_whose_loss_is_not_the_cross_entropy_of_its_logits_is_refused():
    assert logit_obstacle(Toy()) is None
    assert "its own loss()" in (logit_obstacle(OwnLoss()) or "")
    worker = Worker(OwnLoss(), Toy().model())
    with pytest.raises(InputError, match="its own loss"):
        distill_round(worker, student_at(worker.flat), [worker.flat], [[data(5)]], Distill(3), 1, OPTIMIZER)


# --- a peer's work in an iteration ---

TINY = {
    "task": "synthetic",
    "task_options": {"features": 6, "hidden": [5], "classes": 3, "samples": 400, "test_samples": 40, "dropout": 0.3},
    "peers": 7,
    "group_size": 3,
    "iterations": 1,
    "batch": 8,
    "partition.kind": "iid",
}


def local_work(**distill: Any) -> LocalWork:
    config = load(overrides=TINY | {f"distill.{name}": value for name, value in distill.items()})
    return local_work_of(config, technique_of(config))


def test_the_baseline_takes_as_many_steps_as_distillation_and_sees_more_data():
    taught, matched = (
        local_work(iterations=2, epochs=3, batches=2),
        local_work(iterations=2, epochs=3, batches=2, match_local_steps=True),
    )
    assert taught.rounds == len(plan(7, 3).rounds) == 2
    assert taught.extra_steps == 2 * 3 * 2
    assert [taught.steps(t) for t in (2, 3)] == [1, 1]
    assert [matched.steps(t) for t in (2, 3)] == [1 + 12, 1]
    assert [taught.consumes(t) for t in (2, 3)] == [1 + 2, 1]
    assert [matched.consumes(t) for t in (2, 3)] == [1 + 12, 1]
    assert [taught.in_groups(t) for t in (2, 3)] == [True, False]
    assert not matched.in_groups(2)


def test_the_previous_model_teaches_as_many_rounds_as_a_group_would():
    given = local_work(iterations=4, teacher="previous")
    config = load(overrides=TINY)
    task = load_task("synthetic", partition=None, **config.task_options)
    worker = Worker(task, initial_model(task, 0))
    loader = Loader(shard_of(task, 0, 7, 0), seed=0, peer=0, batch_size=8)
    theta, momentum = worker.flat.clone(), torch.zeros_like(worker.flat)
    result = given.update(worker, loader, Start(theta, momentum), iteration=2, consumed=0)
    expected = replace(given, distill=None).update(worker, loader, Start(theta, momentum), iteration=2, consumed=0)
    for round in range(2):
        lesson = [[loader.minibatch(1, 2, 1 + round)]]
        expected = distill_round(worker, expected, [theta], lesson, Distill(4), 2, given.optimizer).result
    assert torch.equal(result.delta, expected.delta)
    assert torch.equal(result.momentum, expected.momentum)
    assert not given.in_groups(2)


# --- a whole iteration ---


def test_an_iteration_is_the_algorithms_written_out_over_the_groups_of_the_plan():
    overrides = TINY | {"distill.iterations": 4, "distill.batches": 2, "distill.epochs": 2, "distill.keep": 0.5}
    config = load(overrides=overrides)
    simulation = Simulation(config)
    start = simulation.world.state.vectors["theta"].clone()  # type: ignore[attr-defined]
    list(simulation.rows())
    state = simulation.world.state.vectors  # type: ignore[attr-defined]

    task = simulation.setup.task.load()
    loaders = [Loader(shard_of(task, p, 7, 0), seed=0, peer=p, batch_size=8) for p in range(7)]
    pupils = [Pupil.of(initial_model(task, 0), start, torch.zeros_like(start)) for _ in range(7)]
    for pupil, loader in zip(pupils, loaders, strict=True):  # one local step each
        minibatch = loader.minibatch(0, 1, 0)
        with dropout_context(minibatch.keys):
            answer = pupil.model(minibatch.batch[0])
        pupil.step(nn.functional.cross_entropy(answer, minibatch.batch[1]), 0.1, 0.9)
    members = [peer for peer, _ in order(config.run_name, 1, [(p, "") for p in range(7)])]
    settings = Distill(4, keep=0.5, epochs=2, batches=2)
    for g, groups in enumerate(plan(7, 3).rounds):
        earlier = [copy.deepcopy(pupil.model) for pupil in pupils]  # θ^{g−1} of everybody
        for group in groups:
            for rank in group:
                me, others = members[rank], [earlier[members[r]] for r in group if r != rank]
                lessons = [[loaders[me].minibatch(1 + b, 1, 1 + 4 * g + 2 * e + b) for b in range(2)] for e in range(2)]
                moshpit_kd(pupils[me], others, lessons, settings, 1, Optimizer())
    theta = torch.stack([flatten(pupil.model) for pupil in pupils]).mean(dim=0)
    momentum = torch.stack([torch.cat([m.flatten() for m in p.momentum.values()]) for p in pupils]).mean(dim=0)
    torch.testing.assert_close(state["theta"], theta, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["momentum"], momentum, rtol=1e-4, atol=1e-6)
