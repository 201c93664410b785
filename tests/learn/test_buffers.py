"""What has no gradient, and momentum that does not travel: buffers in the update, m from the mean update."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from marfl.learn import Optimizer, derive_momentum, local_update
from marfl.state import flatten
from test_update import batches, data, start, worker_for


def test_running_statistics_travel_in_the_update_as_plain_pytorch_leaves_them() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    torch.manual_seed(0)
    worker = worker_for(network())
    theta = worker.flat.clone()
    result = local_update(worker, theta, torch.zeros_like(theta), batches(3), Optimizer())
    reference = network()
    reference.load_state_dict(worker.module.state_dict())
    nn.utils.vector_to_parameters(theta[: worker.trainable].clone(), reference.parameters())
    for module in (reference[1], reference[3]):  # type: ignore[index]
        module.reset_running_stats()
    velocities = [torch.zeros_like(parameter) for parameter in reference.parameters()]
    for inputs, labels in (minibatch.batch for minibatch in batches(3)):
        reference.zero_grad()
        functional.cross_entropy(reference(inputs), labels).backward()
        with torch.no_grad():
            for parameter, velocity in zip(reference.parameters(), velocities, strict=True):
                velocity.mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_(0.1 * velocity)
    assert torch.allclose(result.theta, flatten(reference), rtol=0, atol=1e-6)
    assert result.delta[worker.trainable :].abs().min() > 0
    assert result.momentum[worker.trainable :].abs().max() == 0


def test_momentum_says_nothing_about_buffers() -> None:
    worker = worker_for(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    theta, momentum = start(worker)
    without = momentum.clone()
    without[worker.trainable :] = 0
    results = [local_update(worker, theta, m, batches(2), Optimizer()) for m in (momentum, without)]
    assert torch.equal(results[0].delta, results[1].delta)
    assert torch.equal(results[0].momentum, results[1].momentum)


def test_a_counter_that_does_not_travel_does_not_leak_from_peer_to_peer() -> None:
    # A cumulative average divides by `num_batches_tracked`, which stays local.
    worker = worker_for(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)))
    theta, momentum = start(worker)
    first = local_update(worker, theta, momentum, batches(2), Optimizer())
    again = local_update(worker, theta, momentum, batches(2), Optimizer())
    assert torch.equal(first.delta, again.delta)


def test_a_buffer_that_the_forward_pass_replaces_is_followed() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.linear(inputs)
            if self.training:
                self.mean = 0.5 * self.mean + outputs.mean(0)
            return outputs

    worker = worker_for(Average())
    theta, momentum = start(worker)
    result = local_update(worker, theta, momentum, batches(1), Optimizer())
    inputs, _ = batches(1)[0].batch
    worker.load(theta)
    assert torch.allclose(result.delta[-3:], worker.module.linear(inputs).mean(0), atol=1e-6)
    again = local_update(worker, theta, momentum, batches(1), Optimizer())
    assert torch.equal(again.delta, result.delta)


def mean(results: list[Tensor], weights: list[float]) -> Tensor:
    return sum(w * r.double() for w, r in zip(weights, results, strict=True)) / sum(weights)  # type: ignore[return-value]


def test_the_mean_momentum_follows_from_the_mean_update_when_all_take_one_batch() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    weights = [1.0, 5.0, 2.0]
    results = [local_update(worker, theta, momentum, [data(6, seed)], Optimizer()) for seed in range(3)]
    delta = mean([result.delta for result in results], weights).float()
    derived = derive_momentum(momentum, delta, learning_rate=0.1)
    assert torch.allclose(derived.double(), mean([r.momentum for r in results], weights), rtol=1e-5, atol=1e-7)


def test_the_mean_momentum_counts_aggregators_that_did_not_update_with_their_old_one() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    updated = local_update(worker, theta, momentum, [data(6)], Optimizer())
    delta = mean([updated.delta, torch.zeros_like(theta)], [3.0, 1.0]).float()
    derived = derive_momentum(momentum, delta, learning_rate=0.1, share=0.75)
    assert torch.allclose(derived.double(), mean([updated.momentum, momentum], [3.0, 1.0]), rtol=1e-5, atol=1e-7)


def test_for_several_batches_the_derived_momentum_is_the_mean_over_the_steps() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    steps = batches(3)
    momenta = [local_update(worker, theta, momentum, steps[:count], Optimizer()).momentum for count in (1, 2, 3)]
    delta = local_update(worker, theta, momentum, steps, Optimizer()).delta
    derived = derive_momentum(momentum, delta, learning_rate=0.1, batches=3)
    assert torch.allclose(derived.double(), mean(momenta, [1.0] * 3), rtol=1e-4, atol=1e-6)
