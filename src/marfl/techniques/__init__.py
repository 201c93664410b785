"""The techniques: MAR-FL and everything it is compared with, one file each.

    base, registry                         what a technique is; each by its name
    mar                                    the paper's, and ours that is exact for any number of peers
    fedavg, arfl, rdfl, ring, butterfly    rivals that end on one average over everybody
    saps, braintorrent, gossip             rivals without a global average
    families, hops, talk, matching, loss   what they share: sums, messages, pairs, and the price of a death

Importing this package registers the rivals' exchanges with `marfl.protocol.exchange`.
"""

from marfl.techniques.base import Loss, MixContext, Mixed, Span, Technique, Traits
from marfl.techniques.registry import TECHNIQUES, technique
from marfl.techniques.talk import Circle, Turn

__all__ = [
    "TECHNIQUES",
    "Circle",
    "Loss",
    "MixContext",
    "Mixed",
    "Span",
    "Technique",
    "Traits",
    "Turn",
    "technique",
]
