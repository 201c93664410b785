"""How long a proof is for whoever joins, or was away long: bytes, hops and the time to check it.

    python benchmarks/joining.py [--iterations 10000] [--electors 16 125] [--change 0.01 0.1] [--liars 1]

After each iteration every elector is replaced for good with this probability, by somebody new: nobody ever returns.
A certificate has the signatures of a quorum, drawn at random. Beside the proof from the beginning: the certificates of
all iterations, which prove the same without a skip. Only what ends up in a proof is signed for real, and verified.
Promised: less than 100 kB after 10,000 iterations in which 1 % change. Exit code 1 where that is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from dataclasses import dataclass

from marfl.errors import WireError
from marfl.net.virtual import VirtualNet, VirtualNetwork
from marfl.protocol.ballot import quorum
from marfl.protocol.chain import Anchor, Hop, advanced, cast_on, decode_proof, encode_proof, follow
from marfl.protocol.chronicle import Chronicle
from marfl.protocol.roster import NO_HASH, Elector, Member, Record, Roster, ranked
from marfl.protocol.statements import Certificate, certificate

PROMISED = 100_000  # bytes at 1 %
LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # base58
NETWORK = VirtualNetwork()
NETS: dict[str, VirtualNet] = {}


@dataclass
class Swarm:
    """Electors that come and go, and what one peer keeps of them."""

    size: int
    change: float
    liars: int

    def __post_init__(self) -> None:
        self.dice = random.Random(0)
        self.born = 0
        electors = tuple(self.somebody() for _ in range(self.size))
        self.record = Record(None, NO_HASH, electors)
        self.begin = Anchor.at("benchmark", self.record)
        self.chronicle = Chronicle(self.begin, self.liars)
        self.whole = 0  # bytes of all certificates and rosters

    def somebody(self) -> Elector:
        self.born += 1
        name = "12D3KooW" + "".join(self.dice.choices(LETTERS, k=44))  # as long as a libp2p name
        return Elector(name, self.born - 1)

    def commit(self) -> None:
        """One iteration."""
        iteration, before = self.record.iteration + 1, self.record.electors
        electors = tuple(e if self.dice.random() >= self.change else self.somebody() for e in before)
        members = tuple(Member(*e, 1.0) for e in ranked("benchmark", iteration, electors))
        roster = Roster("benchmark", iteration, 0, NO_HASH, self.record.hash, NO_HASH, "grid", 5, members, (), (), ())
        digest = hashlib.sha256(roster.digest).digest()
        record = self.record.after(roster, digest)
        self.chronicle.note(record, self.votes(roster, digest, ranked("benchmark", iteration, before)))
        self.record = record
        self.whole += len(encode_proof([self.chronicle.recent[iteration].hop]))

    def votes(self, roster: Roster, digest: bytes, electors: tuple[Elector, ...]) -> Certificate:
        """A quorum of votes; their signatures are made when somebody is shown them."""
        said = cast_on(self.chronicle.head, roster, 0, digest).statement
        voters: set[str] = set()
        for elector in self.dice.sample(electors, len(electors)):
            if quorum(electors, voters, self.liars):
                break
            voters.add(elector.id)
        return certificate(electors, 0, {voter: fake(voter, said) for voter in voters})


def fake(peer: str, said: bytes) -> bytes:
    return hashlib.sha512(peer.encode() + said).digest()


def signed(begin: Anchor, hops: list[Hop], liars: int) -> bytes:
    """The proof as bytes, with real signatures instead of those that stand in for them."""
    wanted: dict[bytes, tuple[str, bytes]] = {}

    def want(peer: str, said: bytes, signature: bytes) -> bool:
        wanted[signature] = peer, said
        return signature == fake(peer, said)

    for hop in hops:
        begin = advanced(begin, hop, want, liars)
    data = encode_proof(hops)
    for stand_in, (peer, said) in wanted.items():
        net = NETS.get(peer) or NETS.setdefault(peer, NETWORK.join(peer))
        data = data.replace(stand_in, net.sign(said))
    return data


def measure(size: int, change: float, liars: int, iterations: int) -> int:
    """Print one row; the bytes of the proof from the beginning."""
    swarm = Swarm(size, change, liars)
    middle: Anchor | None = None
    begun = time.process_time()
    for at in range(iterations):
        swarm.commit()
        if at == iterations // 2:
            middle = swarm.chronicle.head
    spent = (time.process_time() - begun) / iterations
    chronicle = swarm.chronicle
    hops = chronicle.proof(swarm.begin.iteration, swarm.begin.link)
    if hops is None or middle is None:
        print(f"{size:8}  {change:6.0%}  no proof: {len(chronicle.posts)} posts do not reach back to the beginning")
        return 0
    data = signed(swarm.begin, hops, liars)
    reader = NETWORK.join(f"reader {size} {change}")
    begun = time.perf_counter()
    head = follow(swarm.begin, decode_proof(data), reader.verify, liars)
    checked = time.perf_counter() - begun
    assert head.is_of(swarm.record)
    later = chronicle.proof(middle.iteration, middle.link)
    half = f"{len(encode_proof(later)) / 1e3:7.1f} kB" if later and follows(middle, later, liars) else "none"
    print(f"{size:8}  {change:6.0%}  {len(data) / 1e3:7.1f} kB  {swarm.whole / len(data):7.0f} ×  {len(hops):5}"
          f"  {checked * 1e3:6.0f} ms  {half:>10}  {len(chronicle.encoded) / 1e6:6.2f} MB"
          f"  {spent * 1e3:7.2f} ms")  # fmt: skip
    return len(data)


def follows(begin: Anchor, hops: list[Hop], liars: int) -> bool:
    """Whether somebody who was away since then is convinced."""
    try:
        follow(begin, hops, lambda peer, said, signature: signature == fake(peer, said), liars)
    except WireError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--electors", type=int, nargs="+", default=[16, 125])
    parser.add_argument("--change", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--liars", type=int, default=1)
    told = parser.parse_args()
    print(f"{told.iterations:,} iterations, {told.liars} liars borne")
    print("electors  change        proof  shorter   hops    check   from half     on disk   per commit")
    sizes = {(size, change): measure(size, change, told.liars, told.iterations)
             for size in told.electors for change in told.change}  # fmt: skip
    kept = all(size < PROMISED for (_, change), size in sizes.items() if change <= 0.01)
    print(f"promised: less than {PROMISED // 1000} kB where 1 % change: {'kept' if kept else 'broken'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
