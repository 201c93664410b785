"""The techniques: MAR-FL and everything it is compared with, one file each.

    technique                              what a technique is, and what those of a family share
    catalogue                              each by its name, for whoever runs one
    mar                                    the paper's, and ours that is exact for any number of peers
    fedavg, arfl, rdfl, ring, butterfly    rivals that end on one average over everybody
    saps, braintorrent, gossip             rivals without a global average
    hops                                   how a peer of a ring or a star waits for the one before it

A technique's file has its citation, its messages and their price, its sums, and what peers of it say to each other.
"""
