"""Masked sums: everybody's update hidden by masks that cancel in the sum (Bonawitz et al. 2017, Bell et al. 2020).

    shamir      a secret cut into shares, any threshold of which give it back
    keys        X25519 key pairs of one attempt, and what two of them agree on
    stream      mask values from a seed: an AES-256 counter stream as integers modulo 2⁶⁴
    session     one member's secrets of one roster: deal, mask, reveal
    lifting     taking the masks off a sum: seeds, and the keys of members that were lost

The graph of neighbours, the thresholds and the cost are in `marfl.plan.masks`; who reveals what, and when, is decided
in `marfl.protocol.unmask`.
"""
