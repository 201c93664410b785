"""Mutants of the protocol, each with one rule broken: the soak must catch it within 300 seeds, or a test of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import test_access
import test_acks
import test_ballot
import test_blame
import test_chain
import test_clocks
import test_daemon_gone
import test_donors
import test_goes_by
import test_incarnations
import test_liars
import test_liars_lesser
import test_made_up_electors
import test_pace
import test_pedigree
import test_readiness
import test_slow_peers
import test_two_words
import test_way_back
from marfl.errors import MarflError
from marfl.protocol import (
    access,
    ballot,
    chain,
    commits,
    fraud,
    pace,
    pedigree,
    roster,
    seniority,
    statements,
    tensors,
    transfer,
)
from marfl.protocol.attempt import Attempt
from marfl.protocol.audit import Audits
from marfl.protocol.chronicle import Chronicle
from marfl.protocol.donors import Donors
from marfl.protocol.instance import Instance
from marfl.protocol.leader import Leader
from marfl.protocol.member import Membership, Verdicts
from marfl.protocol.participant import Participant
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.readiness import Readiness
from marfl.protocol.speaker import Speaker
from marfl.protocol.standing import Standing
from marfl.protocol.transfer import StateTransfer
from marfl.protocol.voting import Voting
from marfl.testing.world import World
from stages.mutation import Edit, mutate

SEEDS = 300


def patched(test: Callable[..., None]) -> None:
    """A test that sets what it needs."""
    with pytest.MonkeyPatch.context() as patch:
        test(patch)


def in_a_directory(test: Callable[..., None], *arguments: object) -> None:
    """A test that writes files."""
    with tempfile.TemporaryDirectory() as place:
        test(*arguments, Path(place))


def keeps_its_promises(seed: int) -> None:
    assert World(seed).run().broken == []


MUTANTS: dict[str, list[Edit]] = {
    "tags and headers without the roster": [
        Edit(Attempt.tag, "self.roster.attempt, round, self._part", "0, round, 0"),
        Edit(tensors.check_header, "data.digest != digest", "False"),
    ],
    "sums in another order on every peer": [
        Edit(Attempt._sum_piece, "rank in sources:", "rank in sorted(sources, key=lambda r: r != self.rank):")
    ],
    "a missing slice counts as zeros": [
        Edit(
            Attempt._repair,
            "raise Stuck(f'no slice of {source} from anybody')",
            "return torch.zeros(want.stop - want.start)",
        )
    ],
    "an earlier result is not adopted": [Edit(ballot.choose, "if not votes:", "if True:")],
    "votes for lower attempts too": [
        Edit(ballot.may_promise, "attempt >= ballot.promised", "True"),
        Edit(ballot.may_vote, "attempt >= ballot.promised", "True"),
        Edit(Instance.promise, "if attempt > self.promised:", "if True:"),
    ],
    "a proxy serves its own sum for anybody's": [
        Edit(Attempt.find, "same = rank == self.rank or self.rank in self.plan.replicas(rank, done)", "same = True")
    ],
    "a commit without a majority of its roster": [
        Edit(ballot.held, "if quorum(members, holders) or ", "if holders or "),
    ],
    "a commit without a majority of the electors": [
        Edit(ballot.decided, "digest if quorum(electors, voters, liars) else None", "digest"),
    ],
    "an update from a stale state is summed": [
        Edit(Participant.run_iteration, "self.behind or mine.base != self.record.hash", "False"),
        Edit(Voting.ack, "mine is not None and (not standing.behind)", "mine is not None"),
    ],
    "NaN and infinity are let in": [
        Edit(tensors.summable, "not within(vector, largest)", "False"),
        Edit(Membership._result, "not all_finite(update)", "False"),
    ],
    "the leader waits for nobody": [Edit(Readiness.gather, "if not first or", "if True or")],
    "nobody catches up": [
        Edit(Participant._fetch_newest, "heads = await self.standing.heads()", "return not self.behind")
    ],
    "a lineage that wins is not looked for": [Edit(Leader._elsewhere, "await self.standing.heads()", "[]")],
    "commits are given up without a word": [
        Edit(Standing.install, "lost or self.discarded", "self.discarded")
    ],
    "a lineage is founded at once": [
        Edit(Leader._alone, "silent >= self.settings.minority_timeout", "True"),
        Edit(Voting._may_follow, "now - instance.in_company >= patience", "True"),
    ],
    "an attempt may have any number": [
        Edit(ballot.in_reach, "0 <= attempt <= ballot.promised + FAR", "True"),
        Edit(ballot.check_ack, "ack.attempt <= attempt + LIFT", "True"),
    ],
}

FIRST = {  # a seed that is known to catch it; the others are caught by 0
    "tags and headers without the roster": 2,
    "sums in another order on every peer": 3,
    "a missing slice counts as zeros": 2,
    "an earlier result is not adopted": 66,
    "a proxy serves its own sum for anybody's": 2,
    "a commit without a majority of its roster": 22,
    "a commit without a majority of the electors": 1,
    "an update from a stale state is summed": 96,
    "NaN and infinity are let in": 71,
    "a lineage that wins is not looked for": 3,
    "commits are given up without a word": 24,
    "an attempt may have any number": 34,
}

# What the soak meets too seldom: the mutant must be noticed by this test.
DIRECTED: dict[str, tuple[Edit, Callable[[], None]]] = {
    "a vote is forgotten once it is decided": (
        Edit(Instance.release, "Ballot(self.promised, _without_data(self.accepted))", "Ballot(self.promised)"),
        test_ballot.test_a_vote_is_not_forgotten_when_the_iteration_is_decided,
    ),
    "a second vote in a decision that is not settled": (
        Edit(Voting._vote_elsewhere, "barred=former.barred", "barred=False"),
        test_incarnations.test_who_voted_before_a_restart_never_votes_in_that_decision_again,
    ),
    "what is late is brought though a roster may have it": (
        Edit(Participant.may_carry, "mine.base not in self.standing.offered and ", ""),
        test_slow_peers.test_what_was_offered_once_is_never_brought_again_for_a_roster_may_have_it,
    ),
    "who says when it is done is waited for, however long": (
        Edit(Readiness._worth, "<= limit", "<= limit + 1000.0"),
        partial(test_slow_peers.test_one_peer_five_times_slower_costs_the_rest_a_fifth_at_most_and_its_work_counts, 3),
    ),
    "who was just given the state is not waited for": (
        Edit(Readiness._coming, "if end > self.net.now()", "if False"),
        test_readiness.test_a_newcomer_meets_one_whose_iterations_are_shorter_than_the_way_to_it,
    ),
    "who is only vouched for is expected": (
        Edit(
            Readiness.answer_vouch,
            "self.notices.vouch(said.peer, said.base, sender)",
            "self.notices.vouch(said.peer, said.base, sender) or self.notices.expect(said.peer, self.net.now())",
        ),
        test_readiness.test_a_lying_elector_that_vouches_for_peers_it_made_up_costs_the_others_no_time,
    ),
    "a certificate that comes later leads over nothing": (
        Edit(Chronicle._go_on, "posts = self._shortened(self.posts, before, said, signatures)", "posts = None"),
        test_chain.test_a_certificate_that_comes_later_leads_over_the_records_that_came_without_one,
    ),
    "the absent are waited for": (
        Edit(Readiness._pass_over, "peers if gone else set()", "set()"),
        test_readiness.test_who_died_is_not_waited_for,
    ),
    "nobody leads in place of a dead leader": (
        Edit(Readiness.first_turn, " | instance.idle", ""),
        test_readiness.test_where_the_first_leader_died_the_next_one_leads_at_once,
    ),
    "who is held up by the silent is left out": (
        Edit(ballot.culprits, "if not _held_up(ack, acks.keys() - slow)", ""),
        partial(
            test_blame.test_whoever_is_held_up_by_others_is_not_left_out_for_it,
            {
                "a": test_blame.ack(("b",), waits=True),
                "d": test_blame.ack(("b",), waits=True),
                "b": test_blame.ack(unsent=("c",)),
            },
            set(),
        ),
    ),
    "who cannot reach a peer that all miss is left out": (
        Edit(ballot._bad_links, "peer in missed", "False"),
        partial(
            test_blame.test_whoever_is_held_up_by_others_is_not_left_out_for_it,
            {
                "a": test_blame.ack(("b",), waits=True, unsent=("b",)),
                "b": test_blame.ack(waits=True),
                "c": test_blame.ack(("b",), waits=True),
                "d": test_blame.ack(("a",), waits=True),
            },
            {"b"},
        ),
    ),
    "a stranger is given slices": (
        Edit(access._is_shown, "rank is not None and attempt.shows(rank, want)", "True"),
        partial(
            test_access.TestOnTheVirtualNetwork().test_a_stranger_that_syncs_the_roster_reads_no_update, "full", "fp32"
        ),
    ),
    "what was missed is fetched from who is late": (
        Edit(Participant._donors, "key=late.__contains__", "key=lambda peer: peer not in late"),
        test_blame.test_what_was_missed_is_fetched_from_somebody_who_did_not_let_me_wait_for_it,
    ),
    "a silent donor is waited for alone": (
        Edit(Donors._hope_for, "self._pace.usual / 2", "2 * self._pace.usual"),
        test_donors.test_one_bad_link_leaves_nobody_else_out_of_the_next_iteration,
    ),
    "a donor whose bytes come is taken for silent": (
        Edit(Donors._hope_for, "max(begun, self._net.last_heard(question.donor))", "begun"),
        test_donors.test_while_bytes_of_a_donor_come_nobody_else_sends_them_again,
    ),
    "clocks begin at zero": (
        Edit(Leader._alone, "instance.in_company", "max(instance.in_company, 0.0)"),
        partial(test_clocks.test_whoever_is_left_without_a_majority_goes_on_whatever_its_clock_shows, -1e4),
    ),
    "a hung peer has as long as its bytes would take": (
        Edit(pace.LifeSigns.silent, "if not self._pace.extra", "if True"),
        partial(test_pace.test_a_hung_peer_costs_about_as_much_where_phases_may_be_very_long, "p4", 1, "grid", "fp32"),
    ),
    "bytes that come are no sign of life": (
        Edit(pace.LifeSigns.heard, "max(self._seen.get(peer, -math.inf), self._net.last_heard(peer))", "-math.inf"),
        test_pace.test_a_link_that_is_slower_than_said_is_named_and_the_others_go_on_without_it,
    ),
    "a phase takes what it always took": (
        Edit(pace.pace_for, "load / rate - usual / 2", "0.0"),
        partial(test_pace.test_what_a_slow_link_carries_in_its_own_time_is_committed_at_once_and_sent_once, "grid"),
    ),
    "nothing to sum is waited for": (
        Edit(ballot.new_roster, "ack.role in (MEMBER, WITNESS)", "False"),
        test_goes_by.test_an_iteration_to_which_nobody_brings_anything_goes_by_at_once,
    ),
    "who trains is not waited for": (
        Edit(ballot.new_roster, "ack.role == NOT_YET", "False"),
        test_goes_by.test_whoever_still_trains_is_waited_for_where_the_others_only_vote,
    ),
    "a majority that waits founds a lineage": (
        Edit(Leader._seal, "instance.heard = self.net.now()", "pass"),
        test_goes_by.test_a_majority_that_waits_for_whoever_trains_founds_no_lineage,
    ),
    "who waits for the others is waited for": (
        Edit(Voting._role, "WITNESS if self.standing.follows else NOT_YET", "NOT_YET"),
        test_goes_by.test_whoever_comes_too_late_and_waits_for_the_others_is_not_waited_for,
    ),
    "who holds what it waited for waits on": (
        Edit(Participant._follow, "self.record.hash != before", "False"),
        test_goes_by.test_whoever_comes_too_late_and_waits_for_the_others_is_not_waited_for,
    ),
    "who does not finish is not told": (
        Edit(Participant._settle, "(late := (late - {self.net.me}))", "(late := set())"),
        test_goes_by.test_a_member_that_does_not_finish_is_told_the_decision_a_phase_later,
    ),
    "who did not answer is not told": (
        Edit(Participant._settle, "why == SILENT", "False"),
        test_goes_by.test_an_elector_whose_vote_was_lost_is_told_the_decision_a_phase_later,
    ),
    "a leader without followers says nothing": (
        Edit(Leader.drive, "not said and (not standing.behind)", "False"),
        test_goes_by.test_a_leader_that_nobody_follows_announces_its_head,
    ),
    "a commit that one peer alone holds": (
        Edit(ballot.kept, "len(holders) >= COPIES", "True"),
        partial(test_goes_by.test_a_commit_outlives_the_only_peer_that_brought_something, 5),
    ),
    "who comes too late is not told": (
        Edit(Readiness._is_late, "instance.lead.closed or instance.promised >= 0", "False"),
        test_goes_by.test_whoever_begins_to_train_when_an_iteration_has_begun_goes_on_from_what_comes_of_it,
    ),
    "only electors hear of a lineage that wins": (
        Edit(Leader._elsewhere, " | instance.lead.seen", ""),
        test_goes_by.test_whoever_waits_with_a_minority_hears_with_it_of_the_lineage_that_wins,
    ),
    "who loses its daemon loses its tasks": (
        Edit(Speaker.reach, "except NetError as error", "except ZeroDivisionError as error"),
        partial(test_daemon_gone.test_a_peer_without_its_daemon_loses_no_task_and_ends_on_the_others_model, "propose"),
    ),
    "as many signers as may lie are enough to skip": (
        Edit(chain._skipped, "bearable(size, liars) + 1", "max(1, bearable(size, liars))"),
        partial(test_chain.test_one_signer_is_too_few_where_one_may_lie, True),
    ),
    "who signs twice counts twice": (
        Edit(chain._shown, "_is_distinct([signer.elector for signer in hop.signers])", "True"),
        partial(test_chain.test_who_signs_twice_counts_once, True),
    ),
    "signers are not shown to be electors": (
        Edit(chain._shown, "shown_root(hop.size, leaves, hop.nodes) == anchor.root", "True"),
        test_chain.test_signers_outside_the_set_count_for_nothing,
    ),
    "anybody's signature skips": (
        Edit(chain._shown, "if signer.elector in known", ""),
        test_chain.test_signers_outside_the_set_count_for_nothing,
    ),
    "a tree says nothing of its size": (
        Edit(roster._topped, "size.to_bytes(8)", "b''"),
        test_chain.test_the_root_says_how_many_electors_there_are,
    ),
    "a founding is skipped": (
        Edit(chain._skipped, "said.lineage == anchor.lineage", "True"),
        test_chain.test_votes_in_another_lineage_prove_nothing_and_no_founding_is_skipped,
    ),
    "a record without a quorum is followed": (
        Edit(chain._followed, "quorum(voters, signers(hop.certificate, said, voters, verify), liars)", "True"),
        test_chain.test_a_record_needs_a_quorum_of_the_electors_before_it,
    ),
    "a lineage without a quorum is followed": (
        Edit(chain._founded, "quorum(voters, signed, liars)", "True"),
        test_chain.test_a_founding_needs_a_quorum_of_the_electors_that_it_names,
    ),
    "other electors are written out": (
        Edit(chain._opened, "root_of(written) == anchor.root", "True"),
        test_chain.test_electors_that_are_not_the_anchor_s_are_not_believed,
    ),
    "a founding beats who went on": (
        Edit(pedigree.compare, "mine.head >= other.iteration", "False"),
        partial(test_pedigree.test_the_first_difference_decides, "who went on beats a founding in that iteration"),
    ),
    "fewer signers win": (
        Edit(pedigree.Founding.beats, "(-self.support, self.hash)", "(self.support, self.hash)"),
        partial(test_pedigree.test_the_first_difference_decides, "more signers"),
    ),
    "nobody asks whether a later attempt is justified": (
        Edit(Voting._may_begin, "not justified(instance.electors, votes, adopt, self.settings.liars)", "False"),
        partial(test_liars.test_a_later_attempt_that_its_promises_do_not_justify_gets_no_vote, 4, "a subset"),
    ),
    "promises need not be signed": (
        Edit(statements.verified_promises, "not verify(", "not (lambda *_: True)("),
        partial(test_liars.test_a_later_attempt_that_its_promises_do_not_justify_gets_no_vote, 4, "forged"),
    ),
    "a certificate is not looked at": (
        Edit(Verdicts.take_over, "check(standing.record, record, votes, self.settings.liars, self.net.verify)", "pass"),
        partial(test_liars.test_a_verdict_without_a_quorum_s_signatures_is_not_believed, 4, 1, "my own vote alone"),
    ),
    "a quorum of a certificate bears no liars": (
        Edit(commits.check, "quorum(electors, who, liars)", "quorum(electors, who)"),
        partial(test_liars.test_a_certificate_needs_a_quorum_that_bears_liars, 4),
    ),
    "a state is taken without a proof": (
        Edit(StateTransfer._verified, "known = want is not None or anchors is None", "known = True"),
        partial(test_liars.test_a_head_that_nobody_certified_is_not_followed, 4, 1, False, "before"),
    ),
    "a head is followed without a proof": (
        Edit(
            StateTransfer.seen,
            "evidence = self._proven(peer, record, said.proof, anchors, last=last)",
            "return Sight.WINS",
        ),
        partial(test_liars.test_a_head_that_nobody_certified_is_not_followed, 4, 1, False, "during"),
    ),
    "a hash is endorsed without evidence": (
        Edit(Voting.is_grounded, "len(known.intersection(shown)) > min(borne, len(bring) - 1)", "True"),
        partial(test_liars.test_a_hash_that_one_member_alone_shows_is_not_endorsed, 4),
    ),
    "who brings something stands back for a single member": (
        Edit(
            Voting._is_plausible,
            "len(bring) > bearable(len(electors), self.settings.liars) or mine is None or (not mine.weight)",
            "True",
        ),
        partial(
            test_liars.test_a_leader_that_names_itself_as_the_only_member_replaces_no_model_of_those_who_bring_something,
            4,
            "endorse",
        ),
    ),
    "what goes by is endorsed unseen": (
        Edit(Voting._is_plausible, "passed_by(self.standing.state, roster).hash == digest", "True"),
        partial(test_liars.test_an_iteration_that_goes_by_changes_no_model_whatever_its_leader_says, 4),
    ),
    "strangers' signatures count for a founding": (
        Edit(commits.Commits.is_beaten, "quorate or new[0].signers >= followed", "True"),
        partial(test_liars.test_a_lineage_that_strangers_found_among_themselves_is_not_followed, 4, 1, 1, "before"),
    ),
    "more strangers begin a run again": (
        Edit(commits.Commits.is_beaten, "2 * mine.foundings[0].signers > self.expected > 0", "False"),
        partial(test_liars.test_more_strangers_than_began_a_run_do_not_begin_it_again, 4, 1),
    ),
    "who cannot prove its head is waited for": (
        Edit(Participant._is_outrun, "any(await asyncio.gather(*map(self.transfer.is_ahead, peers)))", "any(peers)"),
        partial(test_liars.test_a_head_that_nobody_certified_is_not_followed, 4, 1, False, "before"),
    ),
    "a verdict founds a lineage": (
        Edit(Verdicts.take_over, "(record.roster.base, record.lineage) != (instance.base, instance.lineage)", "False"),
        partial(test_liars.test_a_lineage_that_a_leader_founds_in_its_verdict_is_not_entered, 4),
    ),
    "a voter is named many times": (
        Edit(roster._checked, "len({*voters}) == len(voters)", "True"),
        partial(test_liars.test_a_roster_that_no_honest_leader_seals_is_not_begun, "a voter many times"),
    ),
    "a leader says what my update weighs": (
        Edit(Membership._is_fair, "weight == mine.weight and ", ""),
        partial(test_liars.test_a_roster_that_no_honest_leader_seals_is_not_begun, "weights that are not the members'"),
    ),
    "a leader says how large groups are": (
        Edit(Membership._follows, "roster.group_size != self.settings.group_size", "False"),
        partial(test_liars.test_a_roster_that_no_honest_leader_seals_is_not_begun, "groups of another size"),
    ),
    "attempts run out": (
        Edit(ballot.in_reach, "0 <= attempt <= ballot.promised + FAR", "0 <= attempt"),
        partial(test_liars.test_a_proposal_of_a_far_away_attempt_does_not_end_all_attempts, 4),
    ),
    "refusals make attempts run out": (
        Edit(ballot.check_ack, "ack.attempt <= attempt + LIFT", "True"),
        partial(test_liars.test_a_refusal_that_names_a_far_away_attempt_does_not_end_all_attempts, 4),
    ),
    "a donor says who votes next": (
        Edit(StateTransfer._verified, "mine if want == mine.hash else record", "record"),
        test_liars.test_who_gives_a_state_does_not_say_who_votes_next,
    ),
    "a proof may end with a skip": (
        Edit(commits.Commits.checked, " or end.electors is None", ""),
        partial(test_liars.test_who_was_away_is_given_the_certified_record_or_nothing, "a proof that ends with a skip"),
    ),
    "strangers hide heads": (
        Edit(Standing.heads, "at[0] not in known and (not self.is_elector(at[0]))", "False"),
        partial(test_liars.test_strangers_heads_do_not_hide_those_of_electors, 40),
    ),
    "a leader says who has arrived": (
        Edit(Voting._is_well_staffed, "all((is_arrival(", "all((True or is_arrival("),
        partial(test_made_up_electors.test_a_leader_makes_up_no_electors, 4, "signed by the leader"),
    ),
    "a leader says who is a junior": (
        Edit(Voting._is_well_staffed, "if (roster.juniors,", "if False and (roster.juniors,"),
        partial(test_made_up_electors.test_a_leader_makes_up_no_electors, 4, "as electors at once"),
    ),
    "an arrival is good for every attempt": (
        Edit(seniority.arrival, "attempt, index", "index"),
        partial(test_made_up_electors.test_a_leader_makes_up_no_electors, 4, "of another attempt"),
    ),
    "who arrives need not be let in": (
        Edit(seniority.is_arrival, " and entitled(who.id, shown.token)", ""),
        partial(test_made_up_electors.test_in_a_closed_run_nobody_without_a_token_becomes_an_elector, b"made up"),
    ),
    "who only votes becomes an elector": (
        Edit(seniority._counts, "peer in gives", "1"),
        test_made_up_electors.test_many_names_that_only_vote_never_decide,
    ),
    "newcomers vote at once": (
        Edit(seniority.juniors_after, "if count < needed", "if False"),
        partial(test_made_up_electors.test_a_newcomer_votes_once_it_has_contributed_to_so_many_commits, 2),
    ),
    "a state that is lost is waited for for ever": (
        Edit(commits.Commits.is_beaten, "if kinship is Kinship.WINS and lost", "if False"),
        partial(keeps_its_promises, 2400834),
    ),
    "a founding is never followed by who still has a leader": (
        Edit(StateTransfer._is_led, " and waited < self.settings.minority_timeout", ""),
        partial(keeps_its_promises, 469),
    ),
    "one leader leaves electors out for good": (
        Edit(seniority.staying, "if fewer", "if False"),
        partial(
            test_made_up_electors.test_electors_that_one_leader_leaves_out_stay_where_fewer_liars_would_be_borne,
            test_made_up_electors.roster_of(test_made_up_electors.FOUR[:3]), 1, test_made_up_electors.missed("p3"),
        ),
    ),
    "who died stays an elector for ever": (
        Edit(seniority._missed, "if one.missed_by == leader", ""),
        test_made_up_electors.test_of_four_the_one_that_died_is_an_elector_until_two_leaders_have_missed_it,
    ),
    "few seniors wait for newcomers": (
        Edit(seniority.juniors_after, "seniority if seniors + missed >= FEW else 1", "seniority"),
        partial(
            test_made_up_electors.test_who_does_not_vote_yet_follows_from_the_roster, test_made_up_electors.FEWER, 2, ()
        ),
    ),
    "made-up members vouch for a result": (
        Edit(Voting.is_grounded, "len(known.intersection(shown))", "len(shown)"),
        partial(test_made_up_electors.test_made_up_members_do_not_vouch_for_a_result, 4, 2),
    ),
    "who brings something stands back for made-up members": (
        Edit(Voting._is_plausible, "roster.ranks.keys() & electors", "roster.ranks.keys()"),
        partial(test_made_up_electors.test_made_up_members_do_not_vouch_for_a_result, 4, 0),
    ),
    "founders need not sign": (
        Edit(seniority.arriving, "[*roster.electors, *roster.party]", "(roster.party if not roster.electors else ())"),
        partial(test_made_up_electors.test_founders_that_have_not_signed_found_nothing, 4),
    ),
    "a leader's word is enough to take votes for lost": (
        Edit(Standing._look_for_me, "strange and (not self.proofs.borne(instance.electors))", "strange"),
        partial(
            in_a_directory,
            test_made_up_electors.test_who_is_named_without_having_answered_does_not_take_its_votes_for_lost,
            "there",
        ),
    ),
    "a record's word is enough to take votes for lost": (
        Edit(Standing.look_back, "lost and (not bearable(deciders, self.settings.liars))", "lost"),
        partial(
            in_a_directory,
            test_made_up_electors.test_who_is_named_without_having_answered_does_not_take_its_votes_for_lost,
            "away",
        ),
    ),
    "a vote in my name is nothing to me": (
        Edit(Standing._look_for_me, "foreign or ", ""),
        partial(
            in_a_directory,
            test_made_up_electors.test_who_is_shown_its_own_signature_of_a_vote_that_it_has_not_cast_votes_no_more,
            "decided",
        ),
    ),
    "a donor says what was committed": (
        Edit(transfer._commits, "since < at < record.iteration", "at < record.iteration"),
        partial(test_liars_lesser.test_a_donor_does_not_make_a_peer_believe_that_it_gave_something_up, 3),
    ),
    "a restart settles what was not": (
        Edit(commits.Commits.restore, "self.settled = not doubted", "self.settled = True"),
        test_liars_lesser.test_a_restart_settles_nothing,
    ),
    "who is not sure says that others are behind": (
        Edit(Voting._vote_elsewhere, "not standing.proofs.settled", "False"),
        partial(
            test_liars_lesser.test_who_is_not_sure_of_its_record_does_not_tell_others_that_they_are_behind, True
        ),
    ),
    "only electors can give what is adopted": (
        Edit(ballot.justified, "held=adopt is not None", "held=False"),
        test_liars_lesser.test_a_result_whose_data_a_newcomer_alone_holds_is_adopted_all_the_same,
    ),
    "who trains is waited for for ever": (
        Edit(Leader._without_the_slow, "since is None or", "True or"),
        test_liars_lesser.test_who_says_for_ever_that_it_trains_is_not_waited_for_for_ever,
    ),
    "a proof may cost any time": (
        Edit(commits._bounded, "left < 0", "False"),
        partial(
            patched,
            test_liars_lesser.test_a_proof_with_more_signatures_than_anybody_needs_is_not_read_to_its_end,
        ),
    ),
    "goodbyes need not be signed": (
        Edit(statements.leavers, "not verify(", "not (lambda *_: True)("),
        partial(
            test_liars_lesser.test_goodbyes_count_for_the_founding_that_follows_them_if_they_are_signed,
            "in another's name",
        ),
    ),
    "goodbyes that were taken back count": (
        Edit(chain._founded, "if counted > bearable(len(before), liars)", "if True"),
        partial(test_liars_lesser.test_goodbyes_that_were_taken_back_give_a_liar_alone_no_lineage, 4),
    ),
    "goodbyes count for nothing": (
        Edit(pedigree.Founding.support.fget, "self.signers + self.left", "self.signers"),
        partial(test_liars_lesser.test_goodbyes_count_for_the_founding_that_follows_them_if_they_are_signed, ""),
    ),
    "two seals are nothing": (
        Edit(Standing.note_seal, "known is not None and known.parts(instance.signed_id) != said.parts", "False"),
        partial(test_liars_lesser.test_a_leader_that_seals_two_rosters_in_one_attempt_is_named_and_left_out, 5),
    ),
    "two acks are nothing": (
        Edit(Standing.note_promise, "earlier is not None and earlier.promise == said.promise", "earlier is not None"),
        test_two_words.test_a_leader_compares_the_acks_that_it_is_given_itself,
    ),
    "hidden votes are nothing": (
        Edit(Standing._look_for_hidden_votes, "if contradicts(vote, promise)", "if False"),
        test_two_words.test_who_hides_a_vote_from_a_later_leader_is_named_once_the_vote_is_seen,
    ),
    "whoever voted later hides a vote": (
        Edit(fraud._hides, "int(promised) <= int(attempt)", "False"),
        partial(
            test_two_words.test_a_promise_hides_a_vote_if_it_came_later_and_tells_of_none, (-1, b"", b""), 2,
            hides=False,
        ),
    ),
    "two acks in seals are nothing": (
        Edit(Standing.note_seal, "self._compare_grounds(instance, seal)", "pass"),
        test_two_words.test_who_gives_a_lying_leader_two_acks_is_named_with_it,
    ),
    "a leader goes by whatever it likes": (
        Edit(statements.seal_parts, "if promises else", "if False else"),
        partial(test_two_words.test_a_leader_that_shows_two_acks_of_its_own_in_one_attempt_is_named_and_left_out, 5),
    ),
    "requests to endorse need not be signed": (
        Edit(Voting.endorse, "and self.is_signed(instance, roster, seal)", ""),
        partial(
            test_two_words.test_a_leader_that_has_others_endorse_another_roster_than_it_sealed_is_refused_and_named,
            5, signed=True,
        ),
    ),
    "who comes back has forgotten its word": (
        Edit(Standing._taken_up, "self.aside.pop(link_of(self.record), None)", "None"),
        test_two_words.test_who_gives_a_record_up_and_finds_it_certified_after_all_has_not_forgotten_its_promises,
    ),
    "a lineage that was left is entered again": (
        Edit(Voting.vote, "follows and proposal.lineage not in instance.left", "follows"),
        test_two_words.test_nobody_returns_to_a_lineage_that_it_has_left,
    ),
    "a state's hash names a decision": (
        Edit(Instance.signed_id.fget, "link_of(self.before)", "self.base"),
        test_two_words.test_two_records_that_lead_to_one_state_are_two_decisions,
    ),
    "a decision follows a state": (
        Edit(Standing.is_current, " and link_of(instance.before) == link_of(self.record)", ""),
        test_two_words.test_a_decision_follows_its_record_and_not_a_state_of_the_same_hash,
    ),
    "any number of liars is remembered": (
        Edit(Audits._believe, "len(self.standing.banned) >= MOST_BANNED", "False"),
        partial(patched, test_two_words.test_liars_that_somebody_makes_up_are_not_remembered_without_end),
    ),
    "lies of another run count here": (
        Edit(Audits._believe, "proof.run != self.settings.run", "False"),
        partial(test_two_words.test_a_lie_in_another_run_bans_nobody_in_this_one, "another", counts=False),
    ),
    "two votes are nothing": (
        Edit(Standing.note_vote, "voter == peer and other != digest", "False"),
        partial(test_liars_lesser.test_a_member_that_reports_two_hashes_in_one_attempt_is_named_and_left_out, 7),
    ),
    "seals and acks are no proof": (
        Edit(fraud.said_of, "return {(signed.kind, *parts[:5]): parts[5:]}", "return {}"),
        test_liars_lesser.test_seals_and_acks_that_contradict_each_other_are_proof_and_others_are_not,
    ),
    "an attempt is acked twice": (
        Edit(Voting.signed, "ack.attempt not in instance.given", "True"),
        test_liars_lesser.test_an_honest_elector_gives_one_ack_of_an_attempt_however_often_it_is_asked,
    ),
    "who claims another weight counts so with privacy": (
        Edit(ballot.check_ack, "not alike or ack.weight in (0, 1)", "True"),
        partial(
            test_liars_lesser.test_with_privacy_all_count_alike_and_nobody_for_more_than_the_run_allows,
            True,
            2.0,
        ),
    ),
    "a leader weighs updates with privacy": (
        Edit(Settings.may_weigh, "weight in (0, 1) if self.alike else ", ""),
        partial(test_liars_lesser.test_a_roster_in_which_somebody_counts_for_more_is_not_begun_with_privacy, 3.0),
    ),
    "anybody's goodbye will do": (
        Edit(Readiness._is_signed, "not self.net.verify(sender, goodbye(self.settings.run, link), signature)", "False"),
        partial(test_liars.test_a_goodbye_is_its_sender_s_alone, 4),
    ),
    "an elector gives itself another index": (
        Edit(Readiness._own, "known == said.index", "True"),
        partial(test_liars.test_a_goodbye_is_its_sender_s_alone, 4),
    ),
    "who vouched is forgotten": (
        Edit(Readiness._waited_in_vain, "voucher != self.net.me", "False"),
        partial(
            test_liars.test_an_elector_that_vouches_for_strangers_who_never_come_holds_the_others_up_for_a_while_only, 4
        ),
    ),
    "a word of a head that is nowhere is forgotten": (
        Edit(StateTransfer.look_after, "not known", "False"),
        partial(test_liars.test_nobody_leaves_its_iteration_for_somebody_s_word, 4, "a stranger's word"),
    ),
    "who says that it is ahead need not prove it": (
        Edit(Participant.run_iteration, "head.iteration > self.record.iteration or known != head.hash", "False"),
        partial(test_liars.test_nobody_leaves_its_iteration_for_somebody_s_word, 4, "ready"),
    ),
    "a verdict of another lineage is forgotten": (
        Edit(Verdicts.learn, "seen is Sight.LOSES", "False"),
        partial(test_liars.test_a_lineage_that_a_leader_founds_in_its_verdict_is_not_entered, 4),
    ),
    "short certificates need not be shown": (
        Edit(Verdicts.take_over, "not own or (borne and (len(instance.electors) + borne) // 2 < SHORT)", "not own"),
        partial(
            test_liars.test_who_is_told_that_its_own_result_is_decided_does_not_build_on_it_until_that_is_certain, 4, 1
        ),
    ),
    "a second vote is not looked at once it is decided": (
        Edit(Verdicts._compare_late, "second or other", "other"),
        partial(test_liars.test_a_member_that_votes_wrongly_or_twice_is_not_counted, 7, "two hashes"),
    ),
    "what is endorsed is not compared with what was reported": (
        Edit(Leader._endorse, "self.standing.note_vote(led, peer, digest, vote)", "pass"),
        partial(test_liars_lesser.test_a_member_that_reports_one_hash_and_endorses_another_is_named_and_left_out, 1),
    ),
    "any number of words is looked after at once": (
        Edit(StateTransfer.look_after, "teller in self._following", "False"),
        test_liars_lesser.test_who_points_at_many_peers_has_one_of_them_looked_at_at_a_time,
    ),
    "a refusal lifts a leader as far as it likes": (
        Edit(ballot.check_ack, "attempt + LIFT", "attempt + FAR // 2"),
        test_acks.test_a_few_refusals_of_a_liar_lift_no_leader_out_of_the_others_reach,
    ),
    "a vote for another result is forgotten": (
        Edit(Standing._name_others, "got not in (None, record.hash)", "False"),
        partial(test_liars.test_a_member_that_votes_wrongly_or_twice_is_not_counted, 4, "another hash"),
    ),
    "a leader that broke its word is forgotten": (
        Edit(Standing._name_teller, "self.told_by is not None", "False"),
        partial(test_way_back.test_two_halves_that_a_leader_sent_on_come_together_again, 0.1),
    ),
    "strangers found lineages while others train": (
        Edit(Voting._may_follow, "lonely and instance.begun and self.standing.is_elector(sender)", "lonely"),
        test_liars.test_strangers_that_found_lineages_while_all_train_are_not_followed,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_soak_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(MUTANTS[name], monkeypatch)
    attempted = committed = 0
    for seed in dict.fromkeys([FIRST.get(name, 0), *range(SEEDS)]):
        report = World(seed).run()
        if report.broken:
            print(f"caught by seed {seed}: {report.broken[0]}")
            return
        if report.light:
            attempted, committed = attempted + report.attempted, committed + report.committed
    assert committed < 0.95 * attempted, f"no promise was broken in {SEEDS} worlds"


@pytest.mark.parametrize("name", DIRECTED)
def test_a_test_of_its_own_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, test = DIRECTED[name]
    mutate([edit], monkeypatch)
    # A promise is broken, nothing comes of an iteration, or a second rule objects.
    with pytest.raises((AssertionError, TimeoutError, MarflError, pytest.fail.Exception)):
        test()
