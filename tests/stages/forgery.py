"""Messages made for tests: acks of which only a few fields matter, and headers that no honest peer writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import msgpack

from marfl.net.base import Net, PeerId
from marfl.protocol.commits import electors_of
from marfl.protocol.messages import VERSION, Ack, Message
from marfl.protocol.roster import Record
from marfl.protocol.statements import Certificate, cast, certificate


def forged(message: Message, **changes: Any) -> bytes:
    """The header of a message with some fields changed to what need not fit."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    data: bytes = msgpack.packb([VERSION, message.name(), values | changes], use_bin_type=True)
    return data


def an_ack(**said: Any) -> Ack:
    """The ack of a member that has nothing to say but this."""
    plain = Ack(
        status="ack", attempt=0, record=None, join=True, role="member", index=0, layout=bytes(32), wire="fp32",
        incarnation=0, terms=bytes(32), weight=1.0, fewest=0, blamed=(), waits=False, unsent=(), accepted=None,
        accepted_hash=None, accepted_attempt=-1, holds=False, spent=False, epoch=None, heard=(), pledged=None,
        pledged_attempt=-1, sum_here=False, hopeless=False,
    )  # fmt: skip
    return replace(plain, **said)


def certified(
    nets: Mapping[PeerId, Net], before: Record, record: Record, by: Collection[PeerId] | None = None
) -> Certificate:
    """The votes of a record's electors, or only those of these peers: whose keys a test has, it signs for."""
    assert record.roster is not None
    electors = electors_of(before, record)
    said = cast(record.roster, record.roster.attempt, before, record.hash)
    names = [elector.id for elector in electors if by is None or elector.id in by]
    votes = {name: nets[name].sign(said.statement) for name in names}
    return certificate(electors, said.attempt, votes)
