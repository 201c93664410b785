"""LoRA whose average is exact: every A is the same on all peers and frozen, only B is trained and averaged.

A LoRA layer adds B·A to a frozen weight. Where both are averaged, peers get mean(B)·mean(A), and that is not the mean
of what they have learned, mean(B·A). With one A for everybody it is: mean(B)·A = mean(B·A). Sun et al., "Improving LoRA
in Privacy-preserving Federated Learning" (ICLR 2024), call it FFA-LoRA. About half as much travels, and with privacy no
noise is multiplied with noise. The price is that only B learns: some tasks want a larger r for the same quality.
"""

from __future__ import annotations

import math
import zlib
from typing import TypeVar

import torch
from torch import nn

from marfl.errors import InputError

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def exact_lora(model: M, seed: int = 0) -> M:
    """Draw every A of a PEFT model from the seed, the same on all peers, and freeze it; returns the model.

    Before training, on all peers of a run or on none: peers compare what is frozen when they join.
    """
    found = [(name, parameter) for name, parameter in model.named_parameters() if _is_a(name)]
    if not found:
        raise InputError("exact_lora: the model has no LoRA layers; wrap it with peft.get_peft_model first")
    for name, parameter in found:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(parameter.shape[-1])  # as PEFT draws it: kaiming_uniform_(a=√5)
        drawn = torch.rand(parameter.shape, generator=generator).mul_(2 * bound).sub_(bound)
        parameter.copy_(drawn)
        parameter.requires_grad_(False)
    return model


def _is_a(name: str) -> bool:
    return "lora_A" in name or "lora_embedding_A" in name
