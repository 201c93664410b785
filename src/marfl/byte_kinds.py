"""What bytes are for: the kinds that ledgers count, rows and summaries name, and answers carry on the wire."""

from __future__ import annotations

from enum import StrEnum


class ByteKind(StrEnum):
    """What a message's bytes are for. Its value is the name on the wire and on the disk."""

    PAYLOAD = "payload"  # tensor bytes of an exchange
    CONTROL = "control"  # headers, rosters and DHT records
    REPAIR = "repair"  # tensor bytes sent again (also to an auditor), or sent in vain
    SYNC = "sync"  # the state, to somebody who was away
    DISTILL = "distill"  # models shown to a group (Moshpit-KD)
    MASKS = "masks"  # keys, shares, seeds and signatures of masked sums (secure aggregation)
