"""Secure aggregation: updates hidden by masks that cancel in the sum (Bonawitz et al. 2017, Bell et al. 2020).

    graph       who shares masks with whom, how many of them must answer, what it costs
    crypto      key pairs, Shamir's shares, masks from a seed
    session     one member's secrets of one roster: deal, mask, reveal; taking the masks off a sum

It knows nothing of the protocol, which says who tells whom what, and when (`protocol/masked_rounds`).
"""
