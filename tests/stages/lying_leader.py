"""A leader that lies about masked sums: it leads its attempts by hand, and says to everybody what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.mask_pledges import KIND, PledgeProof, keys_for, keys_to, pledge_statement, proof_of
from marfl.protocol.messages import Ack, Held, Ok, Pledge, Propose, Reveal, Seal
from marfl.protocol.participant import Outcome
from marfl.protocol.roster import DecisionId, Member, Roster, brief, ranked
from marfl.protocol.statements import SignedSeal, link_of, seal_parts, statement
from marfl.secagg.graph import KEY_BYTES
from marfl.secagg.session import epoch_of
from stages.liars import named_by
from stages.masks import Stage
from stages.virtual import LAYOUT


class LyingLeader:
    """The first elector of a stage's first iteration. It brings nothing, so that the others exchange without it."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.settings = stage, stage.settings
        self.electors = ranked(self.settings.run, 1, stage.record.electors)
        self.name: PeerId = self.electors[0].id
        self.others = tuple(elector.id for elector in self.electors[1:])
        self.net = stage.people[self.name].net
        self.keys: dict[int, dict[PeerId, bytes]] = {}  # by attempt: the cards and signatures that came with acks
        self.holding: dict[PeerId, dict[bytes, bytes]] = {}  # who reported a sum, and its pledge, by statement
        self.net.serve("held", self._note_held, kind=KIND)

    def play(
        self, attack: Callable[[], Awaitable[None]], iterations: int = 1, *, unnamed: str = ""
    ) -> list[dict[PeerId, Outcome]]:
        """The attack while the others run an iteration; then the liar is gone, and they run so many more.

        The others have named it, and nobody else; or nobody, where a test says why (`unnamed`).
        """

        async def all_of_it() -> list[dict[PeerId, Outcome]]:
            going = asyncio.create_task(self.stage.iterate(skip=(self.name,)))
            await self.pause(1.0)  # everybody is ready
            await attack()
            self.stage.network.crash(self.name)
            found = [await going]
            for _ in range(iterations):
                found.append(await self.stage.iterate())
            return found

        found = run_virtual(all_of_it())
        assert named_by(self.stage.people[peer] for peer in self.others) == (set() if unnamed else {self.name})
        return found

    async def pause(self, seconds: float) -> None:
        await self.net.sleep_until(self.net.now() + seconds)

    # --- what it says ---

    async def propose(self, attempt: int, to: Collection[PeerId] = ()) -> dict[PeerId, Ack]:
        """Ask for votes; the keys that come with them are kept."""
        record, standing = self.stage.record, self.stage.people[self.name].standing
        proposal = Propose(
            1, attempt, attempt - 1, record.lineage, record.hash, False, standing.incarnation,
            standing.terms.digest,
        )  # fmt: skip
        answers = await self._ask(to or self.others, "propose", lambda _: proposal.parcel())
        acks = {peer: Ack.decode(answer.header) for peer, answer in answers.items()}
        promised = {peer for peer, ack in acks.items() if ack.status == "ack"}
        self.keys[attempt] = {peer: bytes(answers[peer].payload) for peer in promised}
        return {peer: acks[peer] for peer in promised}

    def roster(
        self, members: Collection[PeerId], attempt: int = 0, keys: Mapping[PeerId, bytes] | None = None
    ) -> Roster:
        """A masked roster of these, in plan order, of whom it says that each brings one update; all others witness."""
        index = {elector.id: elector.index for elector in self.electors}
        people = [elector.id for elector in self.electors if elector.id in members]
        people += [peer for peer in members if peer not in index]
        rows = tuple(Member(peer, index.get(peer, 1000 + at), 1.0) for at, peer in enumerate(people))
        rest = tuple(elector for elector in self.electors if elector.id not in members)
        record, given = self.stage.record, keys or self.keys[attempt]
        epoch = epoch_of(self.settings.run, 1, people, [given[peer][:KEY_BYTES] for peer in people])
        return Roster(
            self.settings.run, 1, attempt, record.lineage, record.hash, LAYOUT, "full", 3, rows, rest, (), (),
            "masked", epoch,
        )  # fmt: skip

    async def seal(
        self, roster: Roster, attempt: int = 0, to: Collection[PeerId] = (), keys: Mapping[PeerId, bytes] | None = None
    ) -> set[PeerId]:
        """Publish a roster to some of its members; who begins."""
        everything = keys_for(roster, keys or self.keys[roster.attempt])
        signed = self.signed(roster, attempt)  # an unsigned seal would not be looked at
        seal = Seal(brief(roster, self.electors), attempt, None, (), signature=signed.signature)
        told = [peer for peer in to or roster.ids if peer in self.stage.people]
        answers = await self._ask(told, "seal", lambda peer: seal.parcel(keys_to(peer, roster, everything)))
        return {peer for peer, answer in answers.items() if Ok.decode(answer.header).status == "ok"}

    def signed(self, roster: Roster, attempt: int) -> SignedSeal:
        """Its signature that it seals a roster: it gives as many of them as it likes."""
        record = self.stage.record
        decision = DecisionId(self.settings.run, 1, link_of(record), record.lineage)
        parts = seal_parts(decision, attempt, roster.digest, b"")
        return SignedSeal(attempt, roster.digest, b"", self.net.sign(statement("seal", *parts)))

    async def ask_pledges(
        self, roster: Roster, attempt: int, to: Collection[PeerId], by: Collection[PeerId] = ()
    ) -> dict[PeerId, bytes]:
        """The pledges that these electors sign when they are asked; it shows its own, and those of who lies with it."""
        said, liars = pledge_statement(roster, attempt), {self.name, *by}
        places = tuple(at for at, elector in enumerate(self.electors) if elector.id in liars)
        shown = b"".join(self.stage.people[self.electors[at].id].net.sign(said) for at in places)
        asked = Pledge(1, attempt, brief(roster, self.electors), self.signed(roster, attempt).encoded, places)
        answers = await self._ask(to, "pledge", lambda _: asked.parcel(shown))
        return {peer: bytes(answer.payload) for peer, answer in answers.items() if answer.payload}

    def pledges(self, roster: Roster, attempt: int) -> dict[PeerId, bytes]:
        """The pledges to a roster that came with the reports of those who hold its sum, and its own."""
        said = pledge_statement(roster, attempt)
        found = {peer: signed[said] for peer, signed in self.holding.items() if said in signed}
        return found | {self.name: self.net.sign(said)}

    def proof(self, signatures: Mapping[PeerId, bytes]) -> PledgeProof | None:
        return proof_of(self.electors, signatures, self.settings.liars)

    async def reveal(
        self,
        roster: Roster,
        attempt: int,
        proof: PledgeProof,
        seeds_of: tuple[int, ...] = (),
        keys_of: tuple[int, ...] = (),
    ) -> dict[PeerId, bytes]:
        """What all the others give away: a seed, and shares of others' secrets."""
        question = Reveal(1, attempt, roster.digest, proof.places, seeds_of, keys_of)
        answers = await self._ask(self.others, "reveal", lambda _: question.parcel(proof.signatures))
        return {peer: bytes(answer.payload) for peer, answer in answers.items() if answer.payload}

    # --- how ---

    async def _ask(
        self, peers: Iterable[PeerId], channel: str, parcel: Callable[[PeerId], Parcel]
    ) -> dict[PeerId, Parcel]:
        asked, deadline = list(peers), self.net.now() + 3.0
        calls = (self.net.call(peer, channel, parcel(peer), kind=KIND, deadline=deadline) for peer in asked)
        return dict(zip(asked, await asyncio.gather(*calls), strict=True))

    async def _note_held(self, sender: PeerId, request: Parcel) -> Parcel:
        """Somebody holds a masked sum: its pledge is for one of the rosters that were told to it."""
        said = Held.decode(request.header)
        roster = self.stage.people[sender].instance.masks.working
        self.holding.setdefault(sender, {})[pledge_statement(roster, said.attempt)] = bytes(request.payload)
        return Ok("pending").parcel()
