"""A technique of your own: who sends what to whom, and what becomes of it. Here it is Epidemic Learning.

De Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma: Epidemic Learning: Boosting Decentralized Learning with
Randomized Communication, NeurIPS 2023 (arXiv 2310.01972), EL-Local: in every iteration each peer sends its model to
`fanout` others that it draws at random, and averages its own with all that it receives.

From this folder:
    marfl simulate --technique epidemic:EpidemicLearning --set technique.fanout=3 --semantics paper --peers 16
Or run this file: it compares Epidemic Learning with gossip among 16 peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

import marfl


@dataclass(frozen=True)
class EpidemicLearning(marfl.NoGlobalAverage):
    """One phase, `fanout` models from every peer; how many come back to it is chance."""

    fanout: int = 3  # s in the paper; all others, where there are not so many

    name: ClassVar[str] = "epidemic"

    def messages(self, n: int, length: int) -> Iterator[marfl.Messages]:
        sends = range(1, min(self.fanout, n - 1) + 1)
        yield marfl.Messages.of((source, (source + step) % n, length) for source in range(n) for step in sends)

    def mix(self, values: Sequence[Tensor], ctx: marfl.MixContext) -> marfl.Mixed:
        n, length = len(values), values[0].numel()
        sent = []
        for source in range(n):
            others = [peer for peer in range(n) if peer != source]
            dice = Random(f"{ctx.seed}:{ctx.iteration}:{ctx.members[source]}")  # the same in every process
            sent += [(source, dest, length) for dest in dice.sample(others, min(self.fanout, n - 1))]
        mixed = []
        for peer in range(n):
            got = [values[peer], *(values[source] for source, dest, _ in sent if dest == peer)]
            mixed.append(torch.stack(got).mean(dim=0))
        return marfl.Mixed(mixed, ctx.memory, [marfl.Messages.of(sent)] if sent else [])


if __name__ == "__main__":
    for technique in ("epidemic:EpidemicLearning", "gossip"):
        summary = marfl.simulate(
            technique=technique, technique_options={"fanout": 3}, semantics="paper", peers=16, iterations=20, batch=16
        )
        print(f"{technique}: accuracy {summary['final_accuracy']:.1%} after 20 iterations among 16 peers")
