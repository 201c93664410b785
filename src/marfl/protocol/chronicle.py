"""What a peer keeps so that it can prove to others which record is committed: see `chain` for what a proof is.

A chronicle is a row of posts, from the record that the peer trusted at first to the newest one, each with the hop from
the post before. It is kept short: when enough electors of an early post still vote, the posts between that one and the
record they vote on are dropped, and one skip is in their place. So there are about as many posts as times that the
electors were replaced, not as iterations. The last records are kept whole as well, for those who were away shortly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.chain import (
    Anchor,
    Hop,
    Signer,
    Skip,
    advanced,
    cast_on,
    for_knowing,
    hop_to,
    is_count,
    is_hash,
    packed,
    skip_by,
    unpacked,
    unpacked_electors,
    unpacked_hop,
    unpacked_row,
    unpacked_signers,
)
from marfl.protocol.pedigree import Founding
from marfl.protocol.roster import Elector, Record, ranked, root_of
from marfl.protocol.statements import Cast, Certificate, Verify

RECENT = 64  # records that are kept whole
MOST_POSTS = 1024  # the oldest are given up beyond that: who trusts an older record is not proven anything
LISTED = 64  # posts of which all electors are known here, the newest: only they can be skipped from anew
SPARE = 16  # signatures beyond those needed, for whoever trusts a record between two posts
CHRONICLE_BYTES = 2**26


@dataclass(frozen=True)
class Post:
    """A record on the way, and how one gets to it."""

    anchor: Anchor
    hop: Hop | None = None  # from the post before; None: the way begins here
    spare: tuple[Signer, ...] = ()  # where the hop is a skip: more signatures of its vote

    @property
    def signatures(self) -> dict[Elector, bytes]:
        signed = (*self.hop.signers, *self.spare) if isinstance(self.hop, Skip) else ()
        return {signer.elector: signer.signature for signer in signed}


class Chronicle:
    """One peer's proofs. It begins with a record whose electors are known, and hears of every commit after it."""

    def __init__(self, begin: Anchor, liars: int) -> None:
        if begin.electors is None:
            raise ValueError("a chronicle begins with a record whose electors are known")
        self.liars = liars
        self.head = begin
        self.posts = [Post(begin)]
        self.recent = {begin.iteration: Post(begin)}  # by iteration, without gaps, each with the hop from the last one

    # --- what it hears of ---

    def note(self, record: Record, certificate: Certificate | None) -> None:
        """A record was committed on top of my head, and its certificate has been verified.

        None: it is known to be committed, but I cannot show it. Then I prove nothing until I can show the next one.
        """
        if record.roster is None or record.iteration != self.head.iteration + 1:
            raise ValueError(f"iteration {record.iteration} does not follow my head, {self.head.iteration}")
        if certificate is None:
            self._begin_anew(record)
            return
        self._go_on(self.head, record, certificate)

    def show(self, before: Anchor, record: Record, certificate: Certificate) -> None:
        """The certificate of my head is here, after all, and was verified; the record before it is `before`."""
        if self.recent.get(before.iteration, Post(before)).anchor.link != before.link:
            self.recent.clear()
        self.recent = {at: post for at, post in self.recent.items() if at <= before.iteration}
        self.recent.setdefault(before.iteration, Post(before))
        self._go_on(before, record, certificate)

    def _go_on(self, before: Anchor, record: Record, certificate: Certificate) -> None:
        """From a record to the one after it: over a skip from as early as the votes for that one allow."""
        assert record.roster is not None
        hop = hop_to(before, record, certificate)
        after = advanced(before, hop, _believe, self.liars)
        posts = None
        if not record.roster.electors:
            voters = ranked(before.run, record.iteration, before.electors or ())
            signatures = {voters[place]: signature for place, signature in certificate.signatures}
            said = cast_on(before, record.roster, certificate.attempt, record.hash)
            posts = self._shortened(self.posts, before, said, signatures)
        posts = posts or self._way_to(before)  # this one alone, if I was shown nothing of how one gets there
        self.posts = _trimmed([*posts, Post(after, _opened(hop, before))])
        self.recent[after.iteration] = Post(after, hop)
        self.recent.pop(after.iteration - RECENT, None)
        self.head = after

    def _begin_anew(self, record: Record) -> None:
        """Remember the record alone; the posts stay, because the next votes may lead over it."""
        unseen = (Founding(record.iteration, 0, record.hash),) if record.roster and record.roster.electors else ()
        self.head = Anchor.at(self.head.run, record, (*self.head.foundings, *unseen))
        self.recent = {record.iteration: Post(self.head)}

    def take(self, begin: Anchor, hops: Iterable[Hop], verify: Verify) -> Anchor:
        """Go on from a proof that I was given for an anchor of mine (see `anchor`): my new head, or `WireError`."""
        posts, at = self._way_to(begin), begin
        for hop in hops:
            after = advanced(at, hop, verify, self.liars)
            if isinstance(hop, Skip):
                said, signed = hop.said, [(signer.elector, signer.signature) for signer in hop.signers]
                good = {elector: sign for elector, sign in signed if verify(elector.id, said.statement, sign)}
                posts = self._shortened(posts, after, said, good) or [*posts, Post(after, hop)]
            else:
                posts = [*posts, Post(after, _opened(hop, at))]
            at = after
        if at.electors is None:
            raise WireError("a proof that ends with a skip: of the last record nothing is shown")
        self.posts, self.head, self.recent = _trimmed(posts), at, {at.iteration: Post(at)}
        return at

    def _shortened(
        self, posts: Sequence[Post], to: Anchor, said: Cast, signatures: Mapping[Elector, bytes]
    ) -> list[Post] | None:
        """The posts up to the record that these votes are on top of: a skip leads to it from as early as possible."""
        for at, post in enumerate(posts):
            start = post.anchor
            if start.electors is None or start.lineage != said.lineage or start.iteration >= to.iteration:
                continue
            skip = skip_by(said, signatures, start.electors, self.liars)
            if skip is not None:
                used = {signer.elector for signer in skip.signers}
                rest = [Signer(elector, 0, signed) for elector, signed in signatures.items() if elector not in used]
                return [*posts[: at + 1], Post(to, skip, tuple(rest[:SPARE]))]
        return None

    def _way_to(self, begin: Anchor) -> list[Post]:
        """The posts up to an anchor of mine, with the whole records between the last of them and it."""
        posts = [post for post in self.posts if post.anchor.iteration <= begin.iteration]
        last = posts[-1].anchor.iteration if posts else -1
        for iteration in range(last + 1, begin.iteration + 1):
            post, before = self.recent.get(iteration), self.recent.get(iteration - 1)
            if not posts or post is None or post.hop is None or before is None:
                return [Post(begin)]
            posts.append(Post(post.anchor, _opened(post.hop, before.anchor)))
        if posts[-1].anchor.link != begin.link:
            return [Post(begin)]
        return [*posts[:-1], replace(posts[-1], anchor=begin)]  # its electors are known again

    # --- what it proves ---

    def anchor(self, iteration: int) -> Anchor | None:
        """My record of this iteration, where I know its electors: what I ask others for a proof from."""
        kept = (*self.recent.values(), *self.posts)
        found = (post.anchor for post in kept if post.anchor.iteration == iteration)
        return next((anchor for anchor in found if anchor.electors is not None), None)

    def proof(self, iteration: int, link: bytes) -> list[Hop] | None:
        """The shortest way that I know from the record with this link to my head, for whoever knows its electors.

        None: there is none. A record that I do not know may be in my chain or not; the asker will see.
        """
        if self.posts[-1].anchor.link != self.head.link or iteration > self.head.iteration:
            return None
        mine = [post.anchor for post in (*self.posts, *self.recent.values()) if post.anchor.iteration == iteration]
        if any(anchor.link != link for anchor in mine):
            return None
        start = next((anchor for anchor in mine if anchor.electors is not None), None)
        if start is not None:
            return self._way_from(start)
        later = next(at for at, post in enumerate(self.posts) if post.anchor.iteration > iteration)
        if mine:  # a post whose electors I have forgotten
            return _joined([], self.posts[later:])
        first = self.posts[later]
        if not isinstance(first.hop, Skip):
            return None
        return _joined([replace(first.hop, signers=(*first.hop.signers, *first.spare))], self.posts[later + 1 :])

    def _way_from(self, at: Anchor) -> list[Hop] | None:
        """From a record whose electors I know: record by record until a skip leads on, or it is a post."""
        hops: list[Hop] = []
        while at.link != self.head.link:
            for place, post in reversed(list(enumerate(self.posts))):
                if post.anchor.link == at.link:
                    return _joined(hops, self.posts[place + 1 :])
                skip = self._skip_to(post, at)
                if skip is not None:
                    return _joined([*hops, skip], self.posts[place + 1 :])
            after = self.recent.get(at.iteration + 1)
            if after is None or after.hop is None:
                return None
            hops, at = [*hops, after.hop], after.anchor
        return hops

    def _skip_to(self, post: Post, at: Anchor) -> Skip | None:
        """The skip from a record to a post, if enough of its electors signed the votes that lead there."""
        if not isinstance(post.hop, Skip) or post.anchor.lineage != at.lineage or post.anchor.iteration <= at.iteration:
            return None
        return skip_by(post.hop.said, post.signatures, at.electors or (), self.liars)

    # --- as bytes, for the disk ---

    @property
    def encoded(self) -> bytes:
        posts = [[_row(post.hop), post.anchor.electors, _signed(post.spare)] for post in self.posts]
        first, *later = self.recent.values()
        recent = [_row(post.hop) for post in later]
        data: bytes = msgpack.packb([self.liars, _written(self.posts[0].anchor), posts, _written(first.anchor), recent])
        return data

    @classmethod
    def decode(cls, data: bytes) -> Chronicle:
        """The chronicle in these bytes, or `WireError`. They are my own: signatures are not verified again."""
        liars, begin, posts, first, recent = unpacked_row(unpacked(data, CHRONICLE_BYTES), 5)
        oldest = _read(first)
        if not is_count(liars) or oldest.electors is None or not unpacked_row(posts):
            raise WireError("a chronicle with bad fields")
        found = cls(oldest, liars)
        for row in unpacked_row(recent):
            hop = unpacked_hop(row)
            found.head = advanced(found.head, hop, _believe, liars)
            found.recent[found.head.iteration] = Post(found.head, hop)
        found.posts = _read_posts(_read(begin), posts, liars)
        return found


def _believe(peer: PeerId, digest: bytes, signature: bytes) -> bool:
    """Instead of `Net.verify` for what has been verified before."""
    return True


def _opened(hop: Hop, anchor: Anchor) -> Hop:
    """The hop with all electors of the anchor written out."""
    return hop if isinstance(hop, Skip) or hop.electors else replace(hop, electors=anchor.electors or ())


def _joined(hops: Sequence[Hop], posts: Iterable[Post]) -> list[Hop]:
    """One proof of hops and the ways to posts; electors that its reader knows are not shown again."""
    whole = [*hops, *(post.hop for post in posts if post.hop is not None)]
    before: list[Hop | None] = [None, *whole[:-1]]
    return [hop if isinstance(last, Skip) else for_knowing(hop) for last, hop in zip(before, whole, strict=True)]


def _trimmed(posts: Sequence[Post]) -> list[Post]:
    """Not more posts than may be, and the electors of the newest alone."""
    kept = list(posts[-MOST_POSTS:])
    for at, post in enumerate(kept[:-LISTED]):
        if post.anchor.electors is not None:
            kept[at] = replace(post, anchor=post.anchor._replace(electors=None))
    return kept


def _row(hop: Hop | None) -> list[Any] | None:
    return None if hop is None else packed(hop)


def _signed(signers: Iterable[Signer]) -> list[list[Any]]:
    return [[*signer.elector, signer.place, signer.signature] for signer in signers]


def _written(anchor: Anchor) -> list[Any]:
    return [*anchor[:-1], [list(founding) for founding in anchor.foundings]]


def _read(row: Any) -> Anchor:
    """An anchor from plain values, or `WireError`."""
    run, iteration, link, lineage, root, electors, foundings = unpacked_row(row, 7)
    rows = [Founding(*unpacked_row(each, 4)) for each in unpacked_row(foundings)]
    good = isinstance(run, str) and is_count(iteration) and all(is_hash(part) for part in (link, lineage, root))
    if not good or not all(is_count(f.iteration) and is_count(f.support) and is_hash(f.hash) for f in rows):
        raise WireError("a chronicle with a bad anchor")
    anchor = Anchor(run, iteration, link, lineage, root, None, tuple(rows))
    return _listed(anchor, electors)


def _listed(anchor: Anchor, rows: Any) -> Anchor:
    """The anchor with the electors in this row; None: they are forgotten."""
    electors = None if rows is None else unpacked_electors(rows)
    if electors is not None and root_of(electors) != anchor.root:
        raise WireError("a chronicle with other electors than the anchor's")
    return anchor._replace(electors=electors)


def _read_posts(anchor: Anchor, rows: Sequence[Any], liars: int) -> list[Post]:
    """The posts in these rows, the first of which is the anchor's."""
    posts: list[Post] = []
    for row in rows:
        way, electors, spare = unpacked_row(row, 3)
        hop = None if way is None else unpacked_hop(way)
        if posts:
            if hop is None:
                raise WireError("a chronicle with a post that nothing leads to")
            anchor = advanced(anchor, hop, _believe, liars)
        anchor = _listed(anchor, electors)
        posts.append(Post(anchor, hop, unpacked_signers(spare)))
    return posts
