"""A plain PyTorch loop that averages with others.

On the first machine:   python examples/plain_loop.py
It prints an address; on every other one:   python examples/plain_loop.py ADDRESS
Start as many as you like, whenever you like: who joins late starts from the swarm's model.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import marfl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("join", nargs="*", help="address of any peer of the run")
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0", help="/ip4/0.0.0.0/tcp/0 to be reached by others")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of this peer's own data")
    parser.add_argument("--ready-timeout", type=float, default=10.0, help="seconds to wait for slower peers")
    options = parser.parse_args()

    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(options.seed)
    wait = options.ready_timeout
    with marfl.Peer(model, run="plain-loop", join=options.join, listen=options.listen, ready_timeout=wait) as peer:
        print("others join with:", *peer.addresses, sep="\n  ", flush=True)
        for _ in range(options.iterations):
            for _ in range(10):  # any number of local steps
                x = torch.randn(32, 2, generator=data)
                loss = nn.functional.cross_entropy(model(x), (x.prod(dim=1) > 0).long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            outcome = peer.aggregate()
            print(
                f"iteration {outcome.iteration}: {outcome.status}, {len(outcome.present)} averaged,"
                f" without {outcome.missing or 'nobody'}, loss {loss.item():.3f}, model {outcome.hash.hex()[:8]},"
                f" sent {outcome.sent.total()} bytes",
                flush=True,
            )


if __name__ == "__main__":
    main()
