"""What peers sign, and quorums of signatures."""

from __future__ import annotations

import hashlib

import pytest

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.net.virtual import VirtualNet, VirtualNetwork
from marfl.protocol.roster import Elector, leaf, tree_root
from marfl.protocol.statements import Cast, Certificate, certificate, signers, statement

NETWORK = VirtualNetwork()
NETS: dict[PeerId, VirtualNet] = {name: NETWORK.join(name) for name in ("a", "b", "c")}
ELECTORS = tuple(Elector(name, at) for at, name in enumerate(NETS))
HASH = hashlib.sha256(b"state").digest()
SAID = Cast("run", 3, 1, HASH, HASH, HASH, HASH, HASH, HASH)


def signed(*names: PeerId, said: Cast = SAID) -> Certificate:
    return certificate(ELECTORS, said.attempt, {name: NETS[name].sign(said.statement) for name in names})


def test_no_two_statements_share_their_bytes():
    said = [("vote", b"ab", b"c"), ("vote", b"a", b"bc"), ("vote", "a", "b", "c"), ("votea", b"b", b"c"), ("vote", 1)]
    assert len({statement(*each) for each in said}) == len(said)


def test_every_field_of_a_vote_is_signed():
    other = hashlib.sha256(b"other").digest()
    changed = [SAID._replace(**{name: "x" if name == "run" else 7 if name in ("iteration", "attempt") else other})
               for name in Cast._fields]  # fmt: skip
    assert len({each.statement for each in (SAID, *changed)}) == len(changed) + 1


def test_a_certificate_names_who_signed():
    proof = Certificate.decode(signed("c", "a").encoded)
    assert proof == signed("a", "c")
    assert signers(proof, SAID, ELECTORS, NETS["b"].verify) == {"a", "c"}


@pytest.mark.parametrize("said", [SAID._replace(attempt=2), SAID._replace(iteration=4), SAID._replace(hash=bytes(32))])
def test_a_certificate_of_another_vote_is_none(said: Cast):
    with pytest.raises(WireError):
        signers(signed("a", "b"), said, ELECTORS, NETS["b"].verify)


def test_a_signature_in_another_elector_s_place_is_none():
    (place, signature), = signed("a").signatures
    with pytest.raises(WireError):
        signers(Certificate(1, ((place + 1, signature),)), SAID, ELECTORS, NETS["b"].verify)
    with pytest.raises(WireError):
        signers(Certificate(1, ((3, signature),)), SAID, ELECTORS, NETS["b"].verify)


@pytest.mark.parametrize("data", [b"", b"\x93", b"\x90", Certificate(-1, ()).encoded, signed("a").encoded[:-1],
                                  Certificate(1, ((1, bytes(64)), (1, bytes(64)))).encoded,
                                  Certificate(1, ((1, bytes(64)), (0, bytes(64)))).encoded])  # fmt: skip
def test_bytes_that_are_no_certificate_are_refused(data: bytes):
    with pytest.raises(WireError):
        Certificate.decode(data)


def test_the_root_of_the_electors_depends_on_each_and_on_their_order():
    leaves = [leaf(elector) for elector in ELECTORS]
    roots = {tree_root(some) for some in (leaves, leaves[::-1], leaves[:2], leaves[:1], [])}
    assert len(roots) == 5
    assert tree_root(leaves) == tree_root([*leaves])
