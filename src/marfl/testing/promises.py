"""What must hold in every world (invariants): each function looks at a played world and says what is broken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from marfl.net.base import PeerId
from marfl.protocol.ballot import ACCUSES_ALONE, bearable, kept, leader_of, quorum
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.roster import VOID, Elector, Record, Roster, ranked
from marfl.protocol.standing import Standing
from marfl.testing.faults import Fault

if TYPE_CHECKING:
    from marfl.testing.world import World

Votes = dict[tuple[bytes, bytes], dict[PeerId, bool]]  # lineage and hash: who voted for it, holding the data or not


def honest(me: Participant, outcome: Outcome) -> Iterator[str]:
    """Whoever ends an iteration holds the committed model, or knows that it does not."""
    name, record = f"{me.net.me}: iteration {outcome.iteration}", me.history.get(outcome.iteration)
    if outcome.status != "committed":
        if outcome.holds or outcome.hash is not None:
            yield f"{name} is {outcome.status}, and yet names a model"
        return
    if record is None or record.roster is None or record.hash != outcome.hash:
        yield f"{name} is said to be committed, but there is no such record"
    elif set(outcome.present) | outcome.missing.keys() != set(record.roster.ids) | dict(record.roster.omitted).keys():
        yield f"{name} names other peers than its roster"
    elif record.roster.exchange == VOID and outcome.present:
        yield f"{name} names peers whose updates nobody summed"
    elif record.roster.exchange != VOID and outcome.present != record.roster.ids:
        yield f"{name} names other peers than its roster"
    if outcome.holds and me.state.hash != outcome.hash:
        yield f"{name} does not hold the model that it says it holds"
    if not outcome.holds and not me.behind and me.record is record:
        yield f"{name} does not know that it must sync"


def agreed(votes: Votes, instance: Instance, record: Record, liars: int) -> Iterator[str]:
    """Whatever is committed is held by a majority, and a quorum of the electors voted for it.

    A majority of its roster; but a result that is adopted may have lost that, and is then held by one of the electors.
    And as many as `kept` demands: else a commit could be lost with the few who hold it.
    """
    assert record.roster is not None
    cast = votes.get((record.lineage, record.hash), {})
    members = tuple(Elector(member.id, member.index) for member in record.roster.members)
    holders = [peer for peer, holds in cast.items() if holds]
    adopted = instance.lead.attempt > record.roster.attempt
    if not quorum(members, holders) and not (adopted and quorum(instance.electors, holders)):
        yield f"iteration {record.iteration}: committed, but a majority of its roster does not hold it"
    if not kept(record.roster.voters, holders):
        yield f"iteration {record.iteration}: committed, but too few of its voters hold it"
    if not quorum(instance.electors, cast, liars):
        yield f"iteration {record.iteration}: committed, but no quorum of the electors voted for it"


def bounded(world: World) -> Iterator[str]:
    """No iteration takes longer than its time-out (a fast or slow clock stretches it a little)."""
    limit = world.settings.iteration_timeout * 1.3 + 20
    for name, begun, ended, outcome in world.outcomes:
        if ended - begun > limit and name not in world.faulty:
            yield f"{name}: iteration {outcome.iteration} took {ended - begun:.0f} virtual seconds"


def one_commit(world: World) -> Iterator[str]:
    """Never two committed models, nor two rosters, for one iteration in one lineage."""
    seen: dict[tuple[bytes, int], set[bytes]] = {}
    for decision in world.decisions:
        seen.setdefault((decision.record.lineage, decision.record.iteration), set()).add(decision.record.encoded)
    for (lineage, iteration), records in seen.items():
        if len(records) > 1:
            yield f"iteration {iteration}: {len(records)} commits in lineage {lineage.hex()[:8]}"


def one_certain_commit(world: World) -> Iterator[str]:
    """Where somebody lies: never two records of one iteration in one lineage that honest peers know to be certified."""
    for (lineage, iteration), records in world.certain.items():
        if len(records) > 1:
            yield f"iteration {iteration}: {len(records)} certified commits in lineage {lineage.hex()[:8]}"


def certain_sums(world: World) -> Iterator[str]:
    """Where somebody lies, but not with its data: what is certified is what its roster sums to."""
    states = {world.record.hash: (world.start, world.record)}
    known = (record for records in world.certain.values() for record in records.values())
    for record in sorted(known, key=lambda record: record.iteration):
        assert record.roster is not None
        if record.roster.base in states and record.hash not in states:
            after = world.replay(*states[record.roster.base], record.roster)
            states[record.hash] = after, record
            if after.hash != record.hash:
                yield f"iteration {record.iteration}: the certified bits are not those of its roster"


def fragile(world: World) -> bool:
    """Whether so few were electors at some time that none of them may lie."""
    records = [record for records in world.certain.values() for record in records.values()]
    return any(not bearable(len(record.electors), world.settings.liars) for record in records)


def replayed(world: World) -> Iterator[str]:
    """The committed bits are those of the plan over the roster that the record names, and everybody is named."""
    states, seen = {world.record.hash: world.start}, set()
    for record in sorted((decision.record for decision in world.decisions), key=lambda record: record.iteration):
        roster = record.roster
        if (record.hash, record.lineage) in seen or roster is None:
            continue
        seen.add((record.hash, record.lineage))
        if roster.base not in states:
            yield f"iteration {record.iteration}: starts from a state that nobody committed"
            continue
        state, base = states[roster.base], world.base_of(roster)
        summed = roster.members if roster.exchange != VOID else ()
        ages = dict(roster.ages)
        learned = {member.index: world.before(base, ages.get(member.id, 0)) for member in summed}
        if any(member.weight != world.contribution(member.index, learned[member.index]).weight for member in summed):
            yield f"iteration {record.iteration}: the roster names other weights"
        after = world.replay(state, base, roster)
        if after.hash != record.hash:
            yield f"iteration {record.iteration}: the committed bits are not those of its roster"
        unnamed = {elector.id for elector in base.electors} - set(roster.ids) - dict(roster.omitted).keys()
        if unnamed:
            yield f"iteration {record.iteration}: neither present nor missing: {', '.join(sorted(unnamed))}"
        states[record.hash] = after


def said(world: World, me: Standing, before: Record) -> Iterator[str]:
    """Whoever gives up commits says how many."""
    lost = _line(world, before.hash) - _line(world, me.record.hash)
    if len(lost) and not me.discarded:
        yield f"{me.net.me}: gave up {len(lost)} commits before iteration {me.record.iteration} and does not say so"


def _line(world: World, digest: bytes) -> set[bytes]:
    """A committed state and all that it came from."""
    line = set()
    while (record := world.records.get(digest)) and record.roster:
        line.add(digest)
        digest = record.roster.base
    return line


def in_company(world: World, before: Record, record: Record) -> Iterator[str]:
    """Nobody leaves a majority that it could talk to: a lineage is founded where there was none for long."""
    assert record.roster is not None
    world.keep(record)
    patient = world.calm_at + world.settings.minority_timeout * 1.3 + 20 if world.calm_at else 0.0
    if not record.roster.electors or world.network.time < patient:
        return
    there = [name for name in world.people if world.network.alive(name) and name not in world.faulty]
    voters = [name for name in there if world.people[name].standing.barred != record.iteration]
    if quorum(ranked(world.settings.run, record.iteration, before.electors), voters, world.settings.liars):
        yield f"iteration {record.iteration}: a lineage is founded though a majority of the electors is there"


def modest(world: World) -> Iterator[str]:
    """What a peer remembers does not grow with the iterations that are over."""
    for name, me in world.people.items():
        boxes, notices = len(world.network.ports[name].net.boxes), len(me.standing.notices)
        if max(boxes, len(me.history), len(me.helped)) > 12 or notices > len(world.names):
            yield f"{name}: holds {boxes} inboxes, {len(me.history)} records, {notices} notices at the end"


def unmasked_once(world: World) -> Iterator[str]:
    """Nobody's input of an iteration is in two sums whose masks came off: their difference could show it."""
    for iteration, rosters in world.unmasked.items():
        for one, other in combinations(rosters.values(), 2):
            if both := set(one.ids) & set(other.ids):
                yield f"iteration {iteration}: two sums were unmasked with {', '.join(sorted(both))}"


def counted_once(world: World) -> Iterator[str]:
    """What a peer learned from a state is in one sum at most of all that a commit came from, however late."""
    sums: dict[tuple[bytes, PeerId, bytes], list[int]] = {}
    for record in {decision.record.encoded: decision.record for decision in world.decisions}.values():
        if record.roster is None or record.roster.exchange == VOID:
            continue
        base, ages = world.base_of(record.roster), dict(record.roster.ages)
        for member in (one for one in record.roster.members if one.weight):
            learned = world.before(base, ages.get(member.id, 0))
            sums.setdefault((record.lineage, member.id, learned.hash), []).append(record.iteration)
    for (_, peer, _), iterations in sums.items():
        if len(iterations) > 1:
            yield f"what {peer} learned once is in the sums of iterations {', '.join(map(str, iterations))}"


def nothing_lost(world: World) -> Iterator[str]:
    """Where nothing fails, nothing that anybody learned is given up."""
    for peer, iteration in world.lost:
        yield f"iteration {iteration}: what {peer} learned came too late and is in no sum"


def nobody_wronged(world: World) -> Iterator[str]:
    """Nobody is taken for a liar that is none, whatever else fails."""
    for name, me in world.people.items():
        if name != world.liar and (wronged := me.standing.banned.keys() - {world.liar}):
            yield f"{name} takes {', '.join(sorted(wronged))} for liars"


def nobody_left_out(world: World) -> Iterator[str]:
    """While a connected majority lives and few are faulty, every roster has all fault-free peers that take part.

    And an iteration goes by only where none of them brings anything. Of two iterations in a row: somebody fault-free
    must hold the state between them, or nobody could start from it. A leader whose own links are not well cannot tell
    who is silent; whom it has not heard may be late in the next iteration, too, and in no other.
    """
    for roster in dict.fromkeys(decision.record.roster for decision in world.decisions if decision.peer in world.well):
        before = world.base_of(roster).roster if roster else None
        if roster is None or (before and not world.well & set(before.ids)):
            continue  # only the faulty held the state from which it starts: others may have been late with it
        if roster.exchange == VOID:
            bring = _bring(world, roster) & world.well
            if bring and not world.settings.masked and not _accuse_each_other(world, roster):
                yield f"iteration {roster.iteration} goes by, though {', '.join(sorted(bring))} bring something"
            continue
        there = {peer for peer in world.well if not world.watches(world.names[peer], roster.iteration)}
        if any(_led_by_the_ailing(world, one) for one in (roster, before) if one):
            there &= {one.id for one in roster.party}
        if before and _led_by_the_ailing(world, before):
            there &= _knew(world, before)  # the others heard late of what came of it, and trained late
        why = dict(roster.omitted)
        there -= {peer for peer, reason in why.items() if reason == ACCUSES_ALONE}  # it met a peer that sends bad data
        if world.carries:  # what the slow ones learn may be in a later sum: see `nothing_lost`
            there = {peer for peer in there if world.around.pace(world.names[peer]) == 1.0}
        if left := there - set(roster.ids):
            names = ", ".join(f"{peer} ({why.get(peer, 'not known')})" for peer in sorted(left))
            yield f"iteration {roster.iteration} attempt {roster.attempt}: fault-free but left out: {names}"


def _knew(world: World, roster: Roster) -> set[PeerId]:
    """Who took part in a roster's iteration until it was decided."""
    ends = ((name, outcome) for name, _, _, outcome in world.outcomes if outcome.iteration == roster.iteration)
    return {name for name, outcome in ends if outcome.status == "committed"}


def _led_by_the_ailing(world: World, roster: Roster) -> bool:
    """Whether the links of a roster's leader were not well when the iteration began, or in its course."""
    base = world.base_of(roster)
    electors = ranked(world.settings.run, roster.iteration, base.electors)
    leader = leader_of(electors, None, roster.attempt)
    begun = min((d.time for d in world.decisions if d.record.hash == roster.base), default=0.0)
    ended = min(d.time for d in world.decisions if d.record.roster == roster)
    return any(peer == leader and since < ended and begun < until for peer, since, until in world.injector.ailing)


def _bring(world: World, roster: Roster) -> set[PeerId]:
    """Who has an update that any sum is large enough for."""
    base = world.base_of(roster)
    members = {peer: index for peer, index in world.names.items() if not world.watches(index, roster.iteration)}
    mine = {peer: world.contribution(index, base) for peer, index in members.items()}
    return {peer for peer, given in mine.items() if given.weight and not given.fewest}


def _accuse_each_other(world: World, roster: Roster) -> bool:
    """Whether one well peer alone met one that sends bad data: where nobody else brings anything, both sit out."""
    corrupted = any(fault is Fault.CORRUPT for fault, _ in world.injector.hits)
    return corrupted and len(_bring(world, roster) & world.well) == 1 and not world.faulty.isdisjoint(roster.ids)


def _is_worth_a_sum(world: World, roster: Roster) -> bool:
    """Whether as much was brought as a sum takes: where sums are masked, by electors, and not by too few."""
    given, settings = _bring(world, roster), world.settings
    if not settings.masked:
        return bool(given)
    known = {elector.id for elector in world.base_of(roster).electors}
    return len(given & known) >= settings.smallest_sum


def unhindered(world: World) -> Iterator[str]:
    """While all processes and links are well, a lost, late or doubled message never costs an attempt."""
    rosters = dict.fromkeys(decision.record.roster for decision in world.decisions)
    for roster in rosters if not world.faulty else ():
        if roster is None or roster.exchange == world.settings.exchange:
            continue  # else a fallback: not the first roster that was sealed
        if roster.exchange != VOID or _is_worth_a_sum(world, roster):
            yield f"iteration {roster.iteration} attempt {roster.attempt}: an attempt failed though all were well"
