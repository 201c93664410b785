"""What one peer gives another: the agreed state, for whoever is behind, and slices that did not arrive.

A state is checked against the committed hash before it is used, so any peer that has it may give it. Whoever missed
one iteration is given its mean update (one vector); whoever missed more is given the whole state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

from marfl.errors import NetError, SyncError, WireError
from marfl.net.base import Buffer, Parcel, PeerId
from marfl.protocol.attempt import DECIDED, Attempt, resend
from marfl.protocol.ballot import quorum
from marfl.protocol.chain import Anchor, Skip
from marfl.protocol.commits import Evidence, began_apart, electors_of
from marfl.protocol.donors import Answer, Donors, Question
from marfl.protocol.instance import Instance
from marfl.protocol.messages import Committed, Head, Ok, Resend, State, Sync
from marfl.protocol.notices import remember
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import Record, Roster, decode_record
from marfl.protocol.slice_codec import DELTAS, packed_delta, unpacked_delta
from marfl.protocol.standing import EMPTY, UNPROVEN, Caught, Standing
from marfl.protocol.statements import SIGNATURE_BYTES, cast, certificate, link_of
from marfl.protocol.tensors import raw, vector_from
from marfl.state import Snapshot, all_finite

MAX_VECTORS = 16
MINUTE = 60.0
MANY = 4096  # peers whose fetching is counted before those that fetch no more are dropped
TOO_MUCH = "too many states"  # more than one peer may fetch: counted in `Net.refused`
WRONG_STATE = "wrong state"  # whose hash is not the committed one: counted in `Net.refused`
BAD_ANSWER = "bad answer"  # one that cannot be read: counted in `Net.refused`
APART = "another beginning"  # a lineage that nobody can join any more, nor it us: counted in `Net.refused`
ASKED_AT_ONCE = 8  # peers, for the certificate of the newest record


class Sight(Enum):
    """What somebody shows who seems to be elsewhere."""

    WINS = "wins"  # a record that wins over mine, and its proof
    LOSES = "loses"  # a record that is proven, and does not win: of another lineage
    HERE = "here"  # my own record, or one before it
    UNPROVEN = "unproven"  # a record that nothing certifies
    NOTHING = "nothing"  # it does not answer, or has no record


class Allowance:
    """How many bytes each peer may still fetch: a bucket that drains by its whole size in a minute."""

    def __init__(self) -> None:
        self._level: dict[PeerId, tuple[float, float]] = {}  # (bytes, when) of what was given

    def take(self, peer: PeerId, size: int, most: float, now: float) -> bool:
        """Whether a peer may have so many bytes more."""
        level = self._now(peer, most, now)
        if level and level + size > most:
            return False
        self._level[peer] = level + size, now
        if len(self._level) > MANY:  # strangers who come and go must not fill memory
            self._level = {each: was for each, was in self._level.items() if self._now(each, most, now)}
        return True

    def _now(self, peer: PeerId, most: float, now: float) -> float:
        level, then = self._level.get(peer, (0.0, now))
        return max(0.0, level - (now - then) * most / MINUTE)


class StateTransfer:
    """One peer's giving and fetching."""

    def __init__(self, standing: Standing, readiness: Readiness) -> None:
        self.standing, self.readiness = standing, readiness
        self.net, self.settings = standing.net, standing.settings
        self.allowance = Allowance()
        self._looking: set[PeerId] = set()  # whose head is being looked at
        self._following: set[PeerId] = set()  # whose word on a head, its own or another's, is being looked after
        self.given: dict[PeerId, bytes] = {}  # whom I gave a state last, and which: its hash
        self._obtained = b""  # the record whose certificate was asked for
        self._settling: Record | None = None  # the record that is being settled beside all else
        self._missed: tuple[bytes, float] | None = None  # the record whose state nobody gives me, and since when

    # --- states ---

    async def answer_sync(self, sender: PeerId, request: Parcel) -> Parcel:
        """Give my newest state, or the wanted one if I hold it: as one mean update where that suffices."""
        asked = Sync.decode(request.header)
        if asked.want is None and not self._can_prove(asked):
            await self._obtain()
        answer = self._given(asked)
        whole = sum(vector.nbytes for vector in self.standing.state.vectors.values())
        size = memoryview(answer.payload).nbytes
        if size and not self.allowance.take(sender, size, self.settings.sync_states * whole, self.net.now()):
            self.net.refused.note(TOO_MUCH, sender)
            return self.nothing_to_give()
        if size:
            remember(self.given, sender, asked.want or self.standing.state.hash)
            self.standing.talk.aside(self.readiness.vouch(sender))
        return answer

    def nothing_to_give(self) -> Parcel:
        """The answer of a peer that does not have what is asked for."""
        return State("none", (), (), None, (), self.standing.state.version, {}).parcel()

    def _given(self, asked: Sync) -> Parcel:
        standing = self.standing
        if asked.light:
            return self._light(asked)
        state, record, mean = standing.state, standing.record, standing.last_mean
        accepted = standing.instance.accepted if standing.instance else None
        if asked.want not in (None, state.hash) and accepted and accepted.hash == asked.want and accepted.state:
            state, mean = accepted.state, (accepted.roster.base, accepted.mean)
            record = standing.record.after(accepted.roster, accepted.hash)
        if asked.want not in (None, state.hash) or state.hash != record.hash or state.hash == asked.have:
            return self.nothing_to_give()
        commits = sorted(standing.commits.items())
        past = tuple(Committed(at, digest) for at, digest in commits if at < record.iteration)
        proof = standing.proofs.proof(asked.links) if record is standing.record else b""
        common = record.encoded, past, state.version, dict(state.scalars), proof, standing.proofs.settled
        if mean and mean[0] == asked.have and mean[1] is not None and record.roster:
            small = self.settings.integers
            name, payload = packed_delta(mean[1], small.down) if small else ("mean", raw(mean[1]))
            return State("delta", (name,), (mean[1].numel(),), *common).parcel(payload)
        names = tuple(sorted(state.vectors))
        lengths = tuple(state.vectors[name].numel() for name in names)
        return State("full", names, lengths, *common).parcel(_raw([state.vectors[name] for name in names]))

    def _light(self, asked: Sync) -> Parcel:
        """Where I am, and the proof of it: no state."""
        standing = self.standing
        record, vote = standing.record, self._own_vote(standing.record)
        proof = standing.proofs.proof(asked.links)
        past = tuple(Committed(at, digest) for at, digest in sorted(standing.commits.items()) if at < record.iteration)
        return State(
            "light", (), (), record.encoded, past, standing.state.version, {}, proof, standing.proofs.settled, vote
        ).parcel()  # fmt: skip

    def _can_prove(self, asked: Sync) -> bool:
        """Whether I have what convinces this asker of my record, or have nothing to prove."""
        proofs, record = self.standing.proofs, self.standing.record
        known = any(link == link_of(record) for _, link in asked.links)
        return not record.roster or known or bool(proofs.proof(asked.links))

    async def fetch(self, donors: Iterable[PeerId], want: bytes | None, *, believed: bool = False) -> Caught:
        """A verified newer state from the first donor that gives one (see `donors` for how they take turns).

        `believed`: whoever joins has nothing to check a record by, and takes the donors' word for it.
        """
        said: list[str] = []
        asked = Donors(self.standing.talk, self.settings.state_pace(self.standing.values), donors)
        try:
            while (answers := await asked.answers()) is not None:
                for question, begun, answer in answers:
                    try:
                        caught = self._judged(question, answer, want, believed=believed)
                        self._pass_over(asked.silent)
                        return caught
                    except WireError as error:
                        said.append(f"{question.donor}: {error}")
                        if not question.last:
                            asked.ask(self._question(question.donor, question.proofs[1:], want))
                    except (NetError, SyncError) as error:
                        said.append(f"{question.donor}: {error}")
                        self.standing.note_mute(question.donor, begun)
                if (donor := asked.due) is not None:
                    asked.ask(self._question(donor, self._questions(), want))
        finally:
            asked.stop()
        raise SyncError("no donor could give the state: " + ("; ".join(said) or "nobody is known to have it"))

    def _pass_over(self, silent: Iterable[PeerId]) -> None:
        """These have shown nothing while another one gave the state: who is no elector is asked again later."""
        for donor in silent:
            self.standing.note_mute(donor, -math.inf)

    def _question(self, donor: PeerId, proofs: list[list[Anchor]], want: bytes | None) -> Question:
        return Question(donor, proofs, Sync(self.standing.state.hash, want, _links(proofs[0])).parcel())

    def _judged(self, question: Question, answer: Answer, want: bytes | None, *, believed: bool) -> Caught:
        """The state in an answer, if there is one."""
        if not isinstance(answer, Parcel):
            raise answer
        anchors = None if believed else question.proofs[0]
        return self._verified(question.donor, answer, want, anchors, last=believed or question.last)

    def _verified(
        self, donor: PeerId, answer: Parcel, want: bytes | None, anchors: list[Anchor] | None, *, last: bool
    ) -> Caught:
        """The state in an answer, only if its hash is the committed one; without anchors its record is believed."""
        mine = self.standing.record
        given, record = self._read(donor, answer)
        if given.mode not in ("delta", "full") or record is None:
            raise SyncError("does not have it")
        record = mine if want == mine.hash else record  # a state has no word in who votes next
        known = want is not None or anchors is None
        evidence = None if known else self._proven(donor, record, given.proof, anchors or [], last=last)
        if evidence is not None and link_of(record) != link_of(mine) and not self._wins(donor, evidence, record):
            raise SyncError("has nothing newer")
        vectors = self._opened(donor, given, answer.payload)
        mean = vectors.get("mean") if given.mode == "delta" else None
        if mean is not None and record.roster:
            state = self._after(donor, mean, record.roster)
        else:
            state = Snapshot(given.version, vectors, given.scalars)
        if state.hash != record.hash or (want is not None and state.hash != want):
            self.net.refused.note(WRONG_STATE, donor)
            raise SyncError("gave a state whose hash is not the committed one")
        return Caught(record, state, mean, _commits(record, given.past, evidence), evidence)

    def _read(self, donor: PeerId, answer: Parcel) -> tuple[State, Record | None]:
        """An answer and the record in it; who gives one that cannot be read is named, and asked no more."""
        try:
            given = State.decode(answer.header)
            return given, decode_record(given.record) if given.record is not None else None
        except WireError as error:
            raise self._unreadable(donor, error) from None

    def _opened(self, donor: PeerId, given: State, payload: Buffer) -> dict[str, Tensor]:
        """The vectors in an answer; a mean update of small integers is a sum of them, packed."""
        packed = given.mode == "delta" and self.settings.integers and len(given.names) == len(given.lengths) == 1
        try:
            if packed and given.names[0] in DELTAS:
                return {"mean": unpacked_delta(given.names[0], payload, given.lengths[0])}
            return _vectors(given.names, given.lengths, payload)
        except WireError as error:
            raise self._unreadable(donor, error) from None

    def _after(self, donor: PeerId, mean: Tensor, roster: Roster) -> Snapshot:
        """The state after a mean update that somebody gives; one of another length is no answer."""
        try:
            return self.standing.advance(self.standing.state, mean, roster)
        except (RuntimeError, ValueError) as error:  # how tensors and arrays say that they do not fit
            raise self._unreadable(donor, WireError(f"a mean update that does not fit: {error}")) from None

    def _unreadable(self, donor: PeerId, error: WireError) -> SyncError:
        self.net.refused.note(BAD_ANSWER, donor)
        return SyncError(f"gave an answer that cannot be read: {error}")

    # --- proofs ---

    def _wins(self, peer: PeerId, evidence: Evidence, record: Record) -> bool:
        """Whether a proven record wins over mine."""
        standing = self.standing
        electors, instance = standing.electors, standing.instance
        voter = self.net.me in {elector.id for elector in electors} and not standing.is_barred
        busy = voter and instance is not None and instance.base == standing.record.hash and self._is_led(instance)
        if self.readiness.is_alone():
            followed = 1
        elif busy:
            followed = len(electors)
        else:  # one of these is honest, and had heard of no quorum for long when it signed
            followed = standing.proofs.borne(electors) + 1
        beaten = standing.proofs.is_beaten(evidence, record, electors, followed, lost=self._is_lost())
        if not beaten:
            standing.proofs.note_loser(peer, evidence, record)
        if not beaten and began_apart(standing.proofs.chronicle.head.pedigree, evidence.end.pedigree):
            self.net.refused.note(APART, peer)
        return beaten

    def missed(self) -> None:
        """Nobody whom I asked gives me a state."""
        link = link_of(self.standing.record)
        if self.standing.behind and (self._missed is None or self._missed[0] != link):
            self._missed = link, self.net.now()
        if self._is_lost():
            self.standing.proofs.losers.clear()

    def _is_lost(self) -> bool:
        """Whether the state of my newest record seems to be lost: for long nobody has given it to me, as I asked."""
        if self._missed is None or not self.standing.behind:
            return False
        link, since = self._missed
        return link == link_of(self.standing.record) and self.net.now() - since >= self.settings.minority_timeout

    def _is_led(self, instance: Instance) -> bool:
        """Whether a leader has come forward in the iteration that I take part in, or still may.

        One that has led to nothing for so long that others may found a lineage keeps me from none.
        """
        waited = self.net.now() - max(instance.entered, instance.last_sign)
        led = instance.promised >= 0 and waited < self.settings.minority_timeout
        return instance.begun and (led or waited < self.settings.ready_timeout)

    def _questions(self) -> list[list[Anchor]]:
        """What to ask a proof from: my last records; and if that convinces me of nothing, where lineages parted.

        A donor that does not know my last records may take them for some of its own lineage.
        """
        anchors, mine = self.standing.anchors, self.standing.record.lineage
        forks = [anchor for anchor in anchors if anchor.lineage != mine]
        return [anchors, forks] if forks else [anchors]

    def _proven(self, peer: PeerId, record: Record, proof: bytes, anchors: list[Anchor], *, last: bool) -> Evidence:
        """How a record follows what I am sure of; `WireError` if that is not shown; counted if it is the `last` try."""
        try:
            return self.standing.proofs.checked(anchors, record, proof)
        except WireError:
            if last:
                self.net.refused.note(UNPROVEN, peer)
            raise

    async def _obtain(self) -> None:
        """Have the newest record's certificate from those who hold it, once: somebody wants to see it."""
        link = link_of(self.standing.record)
        if link != self._obtained:
            self._obtained = link
            await self.settle(whole=True)

    async def look(self, peer: PeerId) -> Sight | None:
        """Somebody seems to be elsewhere: if its record is proven and wins over mine, I go there. None: I look already.
        """
        if peer in self._looking or peer == self.net.me:
            return None
        self._looking.add(peer)
        try:
            seen = await self.seen(peer)
        finally:
            self._looking.discard(peer)
        if seen is Sight.WINS:
            self.standing.gone_elsewhere(peer)
        return seen

    async def look_after(self, teller: PeerId, peer: PeerId, digest: bytes) -> None:
        """Somebody tells of a head that wins, its own or another's: who tells of one that is not there is named.

        One word of each at a time: it could send me to look at any number of peers.
        """
        if teller in self._following:
            return
        self._following.add(teller)
        try:
            seen = await self.look(peer)
        finally:
            self._following.discard(teller)
        known = digest in self.standing.commits.values()
        if not known and seen in (Sight.HERE, Sight.NOTHING, Sight.UNPROVEN):
            self.net.refused.note(EMPTY, teller)

    async def is_where_it_says(self, peer: PeerId, head: Head) -> bool:
        """Whether the head that a peer announced wins over mine, and is proven; who is not there at all is named.

        Of heads from before what I remember, such as that of the beginning, I cannot tell.
        """
        seen, known = await self.seen(peer), self.standing.commits
        if seen is Sight.HERE and head.hash not in known.values() and head.iteration >= min(known):
            self.net.refused.note(EMPTY, peer)
        return seen is Sight.WINS

    async def is_ahead(self, peer: PeerId) -> bool:
        """Whether a peer holds a record that wins over mine, and can prove it."""
        return await self.seen(peer) is Sight.WINS

    async def seen(self, peer: PeerId) -> Sight:
        """What a peer shows of where it is."""
        questions = self._questions()
        for anchors in questions:
            begun = self.net.now()
            found = await self._ask_light(peer, Sync(self.standing.state.hash, None, _links(anchors), light=True))
            if found is None:
                self.standing.note_mute(peer, begun)
                return Sight.NOTHING
            self.standing.note_answer(peer)
            (said, record), mine = found, self.standing.record
            try:
                if link_of(record) == link_of(mine):
                    self.standing.believe([peer] if said.settled else [])
                    return Sight.HERE
                if record.lineage == mine.lineage and record.iteration < mine.iteration:
                    return Sight.HERE
                last = anchors is questions[-1]
                evidence = self._proven(peer, record, said.proof, anchors, last=last)
                return Sight.WINS if self._wins(peer, evidence, record) else Sight.LOSES
            except WireError:
                continue
        return Sight.UNPROVEN

    async def _ask_light(self, peer: PeerId, question: Sync) -> tuple[State, Record] | None:
        """What a peer says of where it is, and its record; None: nothing that can be read."""
        answer = await self.standing.talk.ask(peer, "sync", question.parcel())
        try:
            said, record = self._read(peer, answer) if answer is not None else (None, None)
        except SyncError:
            return None
        return (said, record) if said is not None and record is not None else None

    def settle_aside(self) -> None:
        """Settle the newest record beside all else, once at a time: any stranger's proposal may ask for it."""
        if self._settling is not self.standing.record:
            self._settling = self.standing.record
            self.standing.talk.aside(self._settled_aside())

    async def _settled_aside(self) -> None:
        try:
            await self.settle()
        finally:
            self._settling = None

    async def settle(self, *, whole: bool = False) -> bool:
        """Make sure that the newest record is certified: by others' word, its certificate, or its electors' votes.

        `whole`: the certificate itself is needed, to show it to others.
        """
        standing, record = self.standing, self.standing.record
        if record.roster is None or standing.before == record:  # the beginning, or it was proven when it came
            return standing.proofs.settled
        electors = electors_of(standing.before, record)
        order = dict.fromkeys([*sorted(standing.proofs.vouchers), *(elector.id for elector in electors)])
        others = [peer for peer in order if peer != self.net.me]
        before = Committed(standing.before.iteration, link_of(standing.before))
        question = Sync(standing.state.hash, record.hash, (before,), light=True)
        votes: dict[int, dict[PeerId, bytes]] = {}
        self._count_vote(record, self.net.me, self._own_vote(record), votes)
        for at in range(0, len(others), ASKED_AT_ONCE):
            some = others[at : at + ASKED_AT_ONCE]
            answers = await asyncio.gather(*(self._ask_light(peer, question) for peer in some))
            for peer, said in zip(some, answers, strict=True):
                if standing.record is not record:
                    return False
                if said is not None:
                    self._hear(record, peer, *said, votes)
            for attempt, signatures in votes.items():
                if quorum(electors, signatures, self.settings.liars):
                    standing.prove(certificate(electors, attempt, signatures))
            if standing.proofs.certificate(record) or (standing.proofs.settled and not whole):
                return True
        return standing.proofs.settled

    def _own_vote(self, record: Record) -> bytes:
        voted = self.standing.vote
        if voted is None or voted[0] != link_of(record):
            return b""
        return voted[1].attempt.to_bytes(8) + self.net.sign(voted[1].statement)

    def _hear(
        self, record: Record, peer: PeerId, said: State, theirs: Record, votes: dict[int, dict[PeerId, bytes]]
    ) -> None:
        """What one of its electors says of my newest record."""
        if link_of(theirs) != link_of(record):
            return
        try:
            if said.proof:
                self._believe_proof(record, said.proof)
        except WireError:
            self.net.refused.note(UNPROVEN, peer)
            return
        self.standing.believe([peer] if said.settled else [])
        self._count_vote(record, peer, said.vote, votes)

    def _believe_proof(self, record: Record, proof: bytes) -> None:
        """Take over the proof of my newest record, which begins with the one before."""
        standing = self.standing
        begin = standing.proofs.anchors([standing.before])[:1]
        for hop in standing.proofs.checked(begin, record, proof).hops:
            if not isinstance(hop, Skip):
                standing.prove(hop.certificate)

    def _count_vote(self, record: Record, peer: PeerId, vote: bytes, votes: dict[int, dict[PeerId, bytes]]) -> None:
        if len(vote) != 8 + SIGNATURE_BYTES or record.roster is None:
            return
        attempt, signature = int.from_bytes(vote[:8]), vote[8:]
        said = cast(record.roster, attempt, self.standing.before, record.hash)
        if self.net.verify(peer, said.statement, signature):
            votes.setdefault(attempt, {})[peer] = signature

    # --- slices ---

    async def answer_resend(self, _: PeerId, request: Parcel) -> Parcel:
        """Somebody misses a slice that I may hold; once the iteration is decided it is told so, and can ask how."""
        digest, known = Resend.decode(request.header).digest, self.standing.history.values()
        if any(record.roster is not None and record.roster.digest == digest for record in known):
            return Ok(DECIDED).parcel()
        return await resend(under_way(self.standing), request)


def _links(anchors: Iterable[Anchor]) -> tuple[Committed, ...]:
    return tuple(Committed(anchor.iteration, anchor.link) for anchor in anchors)


def under_way(standing: Standing) -> Attempt | None:
    """The attempt whose slices this peer still gives to those who miss them: none once the iteration is decided."""
    instance = standing.instance
    return instance.work.exchange if instance is not None and instance.record is None else None


def _raw(vectors: list[Tensor]) -> memoryview:
    return raw(vectors[0] if len(vectors) == 1 else torch.cat(vectors))


def _commits(record: Record, past: tuple[Committed, ...], evidence: Evidence | None) -> dict[int, bytes]:
    """The commits that a donor tells of, and over them those that its record and its proof name.

    Up to where a proof begins they are my own: nothing that a donor says of those counts.
    """
    since = evidence.begin.iteration if evidence is not None else -1
    told = {at: digest for at, digest in past if since < at < record.iteration}
    before = {record.iteration - 1: record.roster.base} if record.roster and record.iteration - 1 > since else {}
    shown = evidence.hashes if evidence is not None else {}
    return told | before | shown | {record.iteration: record.hash}


def _vectors(names: tuple[str, ...], lengths: tuple[int, ...], payload: Buffer) -> dict[str, Tensor]:
    if not 0 < len(names) == len(lengths) <= MAX_VECTORS or min(lengths) < 0:
        raise WireError("a state with bad vectors")
    joined = vector_from(payload, sum(lengths))
    if not all_finite(joined):
        raise WireError("a state with NaN or infinity")
    return dict(zip(names, torch.split(joined, list(lengths)), strict=True))
