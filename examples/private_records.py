"""Hospitals that train together and hide every single patient from each other and from everybody else.

On the first machine:   python examples/private_records.py
It prints an address; on two or more others:   python examples/private_records.py ADDRESS
Sums are masked, so three must be there. Every patient is in a batch with probability 64/1,000, in secret.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

import marfl


def patients(seed: int, count: int = 1000) -> TensorDataset:
    """This hospital's own: four measurements, and whether they are ill."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0.5 * x[:, 2]).long())


def loss(model: nn.Module, record: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of one patient, who comes as a batch of one row."""
    measurements, ill = record
    return nn.functional.cross_entropy(model(measurements), ill)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("join", nargs="*", help="address of any peer of the run")
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0", help="/ip4/0.0.0.0/tcp/0 to be reached by others")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--hospitals", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of this hospital's patients")
    parser.add_argument("--state", help="where it is kept what was given away; a new folder by default")
    options = parser.parse_args()

    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    privacy = {
        "unit": "record", "records": 1000, "noise_multiplier": 1.0, "shares": options.hospitals, "delta": 1e-5,
        "target_epsilon": 8, "target_observer": "insider_masked",
    }  # fmt: skip
    records = marfl.RecordData(patients(options.seed), loss, batch=64, learning_rate=2.0)
    with marfl.Peer(
        model, run="private-records", join=options.join, listen=options.listen, expected=options.hospitals, masks=True,
        privacy=privacy, records=records, state_dir=options.state or tempfile.mkdtemp(),
    ) as peer:  # fmt: skip
        print("others join with:", *peer.addresses, sep="\n  ", flush=True)
        test = patients(10**6)[:]
        for _ in range(options.iterations):
            outcome = peer.aggregate()  # samples, clips, adds noise, averages, and makes the step
            accuracy = (model(test[0]).argmax(dim=1) == test[1]).float().mean()
            spent = ", ".join(f"{observer} {epsilon:.2f}" for observer, epsilon in outcome.epsilons.items())
            print(
                f"iteration {outcome.iteration}: {outcome.status}, {len(outcome.present)} averaged, accuracy"
                f" {accuracy:.1%}, epsilon: {spent}",
                flush=True,
            )
            if outcome.spent:
                break


if __name__ == "__main__":
    main()
