"""Mutants of the rules of masks and of differential privacy: each must make the test that is named beside it fail.

What a mutant breaks is seldom seen in the model: sums stay right while values can be read, or ε is too low. So each of
them has a test that looks for exactly that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import test_accounting as ledgers
import test_calibration as calibration_tests
import test_discrete_gaussian as gaussian_tests
import test_fixed as fixed_tests
import test_lattice as lattice_tests
import test_lying_leaders as lying
import test_mask_pledges as proofs
import test_masks_core as core
import test_masks_protocol as masked
import test_mechanism as mechanisms
import test_privacy_ledger as accounts
import test_private_runs as runs
import test_record_audit as audits
import test_record_level as record_tests
import test_record_runs as record_runs
import test_target as targets
from marfl.dp import calibration, mechanism, noise
from marfl.dp import discrete_gaussian as gaussians
from marfl.dp import lattice as lattices
from marfl.dp import record_level as records
from marfl.dp.accounting import Observer, Release
from marfl.dp.ledger import Spending
from marfl.dp.private_agreement import RecordAgreement
from marfl.peer.privacy_ledger import Account
from marfl.peer.state_dir import StateDir
from marfl.peer.trainer import Trainer
from marfl.protocol import ballot, member
from marfl.protocol import fixed_point as fixed
from marfl.protocol import mask_pledges as pledges
from marfl.protocol import masked_rounds as rounds
from marfl.protocol.mask_pledges import Masking
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.member import Membership
from marfl.protocol.roster import Roster
from marfl.protocol.standing import Standing
from marfl.protocol.voting import Voting
from marfl.secagg import crypto as keys
from marfl.secagg import graph
from marfl.secagg import session as lifting
from marfl.secagg.session import Session
from marfl.sim.engine import Simulation
from marfl.sim.exact_world import ExactWorld
from stages.mutation import Edit, mutate


class Mutant(NamedTuple):
    """A broken rule, and the test that must notice."""

    edits: list[Edit]
    test: Callable[..., Any]  # with its parameters, but for the fixtures `monkeypatch`, `tmp_path` and `store`


def edit(function: Callable[..., Any], old: str, new: str) -> list[Edit]:
    return [Edit(function, old, new)]


MASKS = {
    "no self mask": Mutant(
        edit(Session.masked, "add_mask(value.clone(), self.seed)", "value.clone()")
        + edit(lifting.lift, " - _blanket(tuple(sorted(seeds.items())), total.numel(), total.dtype)", ".clone()"),
        core.test_a_value_that_arrives_late_stays_hidden_when_its_owners_key_is_known,
    ),
    "no pairwise masks": Mutant(
        edit(Session.masked, "in self.neighbours", "in ()"),
        core.test_whoever_knows_all_seeds_still_cannot_read_a_single_value,
    ),
    "seed and key of one peer": Mutant(
        edit(Session._give, "or self._given.setdefault(owner, what) != what", ""),
        core.test_a_member_gives_away_a_seed_or_a_key_and_never_both,
    ),
    "the threshold is two thirds": Mutant(
        edit(graph.threshold, "2 * degree // 3 + 1", "2 * degree // 3"),
        core.test_small_swarms_share_with_everybody_and_large_ones_with_few,
    ),
    "the threshold is a majority": Mutant(
        edit(graph.threshold, "2 * degree // 3 + 1", "degree // 2 + 1"),
        core.test_two_secrets_of_one_peer_take_more_shares_than_its_neighbours_give_unless_a_third_lies,
    ),
    "one share suffices": Mutant(
        edit(Session.deal, "cut(self.seed, threshold(count), count)", "cut(self.seed, 1, count)"),
        core.test_one_share_fewer_than_the_threshold_gives_neither_the_seed_nor_the_key,
    ),
    "one share of a key suffices": Mutant(
        edit(Session.deal, "cut(self.pair.secret, threshold(count), count)", "cut(self.pair.secret, 1, count)"),
        core.test_one_share_fewer_than_the_threshold_gives_neither_the_seed_nor_the_key,
    ),
    "too few shares are joined": Mutant(
        edit(keys.mended, "len(shares) < threshold", "len(shares) < threshold - 1"),
        core.test_too_few_neighbours_recover_nothing,
    ),
    "one pair of keys for all attempts": Mutant(
        edit(Masking.offer, "setdefault(attempt,", "setdefault(0,")
        + edit(Masking.open, "self.offered.get(roster.attempt)", "self.offered.get(0)"),
        partial(masked.test_a_death_in_between_costs_an_attempt_with_fresh_keys, "reduce"),
    ),
    "one mask for all epochs": Mutant(
        edit(keys.mask_seed, "b'mask' + epoch", "b'mask'"),
        core.test_two_peers_agree_on_a_mask_and_a_third_does_not,
    ),
    "shares that their receiver cannot tell apart": Mutant(
        edit(keys.seal_share, "encrypt(_NONCE, share, context)", "encrypt(_NONCE, share, None)")
        + edit(keys.open_share, "decrypt(_NONCE, sealed, context)", "decrypt(_NONCE, sealed, None)")
        + edit(keys._agreed, "b'marfl ' + purpose", "b'marfl '"),
        core.test_only_its_receiver_reads_a_share_and_only_in_its_place,
    ),
    "masked anew in a second sum": Mutant(
        edit(Session.masked, "if self._masked is None:", "if True:"), core.test_a_masked_value_is_made_once
    ),
    "help for a second roster": Mutant(
        edit(Standing.may_help, "== roster.digest", "!= b''"),
        partial(masked.test_nobody_helps_to_unmask_without_a_quorum_or_for_a_second_roster, 1, 4),
    ),
    "help without a quorum": Mutant(
        edit(pledges.proves, "if not quorum(electors, named, liars)", "if False"),
        partial(masked.test_nobody_helps_to_unmask_without_a_quorum_or_for_a_second_roster, 1, 4),
    ),
    "help with a majority in which nobody need be honest": Mutant(
        edit(pledges.proves, "quorum(electors, named, liars)", "quorum(electors, named)"),
        partial(masked.test_nobody_helps_to_unmask_without_a_quorum_or_for_a_second_roster, 1, 4),
    ),
    "a pledge is not told": Mutant(
        edit(Masking.told, "mine.roster.encoded if mine else None", "None"),
        partial(masked.test_when_the_leader_dies_after_the_sum_the_next_one_sees_the_same_roster_through, "reveal"),
    ),
    "a pledge is not heeded": Mutant(
        edit(pledges.promised, "if not heard:", "if True:"),
        partial(masked.test_when_the_leader_dies_after_the_sum_the_next_one_sees_the_same_roster_through, "reveal"),
    ),
    "brought to two lineages": Mutant(
        edit(Masking.is_spent, "self.lineage not in (None, lineage) or ", ""),
        masked.test_a_value_that_may_be_in_one_lineages_sum_is_in_no_others,
    ),
    "brought again after a restart": Mutant(
        edit(Masking.is_spent, " or barred", "") + edit(MaskedRounds.reveal, " or barred == instance.iteration", ""),
        masked.test_after_a_restart_nobody_brings_again_what_may_have_left_before,
    ),
    "sums of two": Mutant(
        edit(pledges.is_sound, ">= smallest", ">= 1"),
        partial(masked.test_fewer_than_three_contributions_are_never_summed, (1.0, 1.0)),
    ),
    "overflow in the encoding": Mutant(
        edit(fixed.fits, "(value.abs() <= LARGEST).all()", "True"),
        partial(fixed_tests.test_what_would_overflow_is_refused, 16385.0),
    ),
    "a sum out of range": Mutant(
        edit(fixed.check_range, "high > limit or low < -limit", "False"),
        masked.test_a_wrong_value_spoils_the_sum_and_nobody_is_named_for_it,
    ),
    "values travel before all shares are in custody": Mutant(
        edit(MaskedRounds.mean, "await self._trade_shares(attempt, session)", "pass"),
        partial(masked.test_a_death_after_the_sum_costs_its_neighbours_shares_and_no_attempt, "reveal"),
    ),
}

LIARS = {  # what a leader, or a member, may lie about
    "pledges without signatures": Mutant(
        edit(pledges.proves, "return all(", "return True or all("),
        partial(lying.test_votes_without_signatures_open_nothing, 1),
    ),
    "one vote counts twice": Mutant(
        edit(pledges.proves, " or list(places) != sorted(set(places))", ""),
        proofs.test_a_proof_with_a_vote_twice_or_out_of_place_proves_nothing,
    ),
    "pledges of another attempt": Mutant(
        edit(pledges.pledge_statement, "attempt, roster.digest", "roster.digest"),
        partial(lying.test_pledges_of_another_attempt_or_to_another_roster_open_nothing, 1),
    ),
    "pledges to another roster": Mutant(
        edit(pledges.pledge_statement, "attempt, roster.digest", "attempt"),
        partial(proofs.test_a_proof_is_a_quorum_of_signatures_and_no_more, 1, 5),
    ),
    "pledges to two rosters": Mutant(
        edit(Masking.bind, "!= roster.digest", "== b''")
        + edit(MaskedRounds.pledge, "self._is_sealed(sender, instance, roster, asked)", "True")
        + edit(MaskedRounds.pledge, "self._took_place(instance, roster, asked, shown)", "True"),
        partial(lying.test_a_leader_that_tells_two_rosters_never_has_proofs_of_both, 8, 1),
    ),
    "keys that nobody has signed": Mutant(
        edit(Masking.open, "if not is_signed_card(", "if False and not is_signed_card("),
        lying.test_in_a_large_roster_the_neighbours_of_a_swapped_key_do_not_begin,
    ),
    "keys of another attempt": Mutant(
        edit(pledges.card_statement, "*decision, attempt, card", "*decision, card"),
        partial(lying.test_nobody_masks_its_value_under_a_key_that_its_owner_did_not_sign_for_this_attempt, 0),
    ),
    "a seed that is not the one spoken of": Mutant(
        edit(pledges.card_statement, "attempt, card", "attempt, card[:64]"),
        proofs.test_a_card_covers_the_hash_of_the_seed,
    ),
    "keys of a leader's acks are not looked at": Mutant(
        edit(MaskedRounds.checked_keys, "data if signed else b''", "data"),
        lying.test_whose_keys_are_not_signed_is_left_out_by_name_and_the_others_sum,
    ),
    "an epoch begins anew": Mutant(
        edit(Masking.open, "self.session is not None and self.session.epoch == roster.masks", "not keys"),
        partial(proofs.test_a_member_is_sent_all_cards_and_its_neighbours_signatures, 7),
    ),
    "who is left out pledges itself": Mutant(
        edit(pledges.agrees, "peer in roster.ranks or", "ack.join or"),
        partial(lying.test_a_victim_and_two_accomplices_get_no_pledges_of_those_who_bring_something_too, False, 1),
    ),
    "who still trains pledges itself": Mutant(
        edit(pledges.agrees, "ack.role == WITNESS", "not ack.join"),
        partial(lying.test_a_victim_and_two_accomplices_get_no_pledges_of_those_who_bring_something_too, True, 1),
    ),
    "whoever trains is not waited for": Mutant(
        edit(pledges.masked, "ack.role == NOT_YET", "False"),
        proofs.test_a_leader_waits_where_too_many_still_train,
    ),
    "made-up members count": Mutant(
        edit(pledges.known_contributions, " and member.id in known", ""),
        proofs.test_of_made_up_members_none_counts_towards_a_sum_that_is_large_enough,
    ),
    "a roster that is too small for the run": Mutant(
        edit(pledges.is_sound, ">= smallest", ">= 3"), lying.test_a_roster_smaller_than_the_run_allows_is_not_begun
    ),
    "a leader names the electors": Mutant(
        edit(member.names_electors_rightly, "instance.founder is not None and", "True or"),
        proofs.test_only_who_founds_a_lineage_names_its_electors,
    ),
    "a graph that the order of members decides": Mutant(
        edit(graph.neighbours.__wrapped__, "sorted(members)", "members"),
        core.test_another_state_or_member_gives_another_graph_and_another_order_of_members_does_not,
    ),
    "what is recovered is not compared": Mutant(
        edit(keys.mended, "secret is not None and fits(secret)", "secret is not None"),
        partial(core.test_a_secret_is_recovered_although_some_shares_are_wrong_and_is_the_published_one_or_none, 8),
    ),
    "a seed is not compared": Mutant(
        edit(rounds.Gathered.note, "elif self._fits(giver, data)", "elif True"),
        partial(lying.test_a_wrong_seed_is_not_taken_and_follows_from_its_owners_shares_instead, 1),
    ),
    "a leader's secrets are not compared": Mutant(
        edit(rounds.read_secrets, "if not (is_seed if is_member else is_key)(card, secret)", "if False"),
        partial(lying.test_wrong_secrets_of_a_leader_unmask_nothing_and_the_next_one_sees_the_roster_through, 1),
    ),
    "who deals badly is not named": Mutant(
        edit(MaskedRounds._gather, "found.dealt_badly()", "()"),
        partial(lying.test_whoever_deals_bad_shares_is_named_and_sits_out_while_the_others_go_on, 1),
    ),
    "who dealt badly is forgotten": Mutant(
        edit(pledges.suspected, "iteration - when <= SUSPECTED", "iteration == when"),
        partial(lying.test_whoever_deals_bad_shares_is_named_and_sits_out_while_the_others_go_on, 1),
    ),
    "a pledge that a liar made up is heeded": Mutant(
        edit(pledges.promised, "len(by) > borne or", "by or"),
        partial(lying.test_an_elector_that_makes_up_a_pledge_stops_nobody, 1),
    ),
    "a roster that nobody else signs is seen through for ever": Mutant(
        edit(pledges._free, " or agrees(peer, ack, roster)", " or True"),
        proofs.test_a_roster_is_lost_that_too_few_can_pledge_themselves_to,
    ),
    "one liar calls a roster hopeless": Mutant(
        edit(pledges.promised, "> borne or not possible", "> 0 or not possible"),
        partial(proofs.test_a_roster_is_hopeless_when_more_than_the_liars_say_so, 1, 1, False),
    ),
}

PRIVACY = {
    "noise drawn anew in a second attempt": Mutant(
        edit(Account.draw, "and self._vector is not None", "and False"),
        accounts.test_a_second_try_of_an_iteration_sends_the_very_same_vector,
    ),
    "not on the disk before it leaves": Mutant(
        edit(Account.draw, "self._save()", "pass"), accounts.test_what_is_drawn_is_on_the_disk_before_it_can_leave
    ),
    "a crash is free": Mutant(
        edit(Account._pending, "0 if self._vector is None else None", "None"),
        accounts.test_after_a_crash_the_forgotten_vector_counts_beside_the_new_one,
    ),
    "a crash is not reserved": Mutant(
        edit(Account.affords, "pending=self._pending(iteration, base)", "pending=None"),
        targets.test_a_vector_that_a_crash_left_open_is_reserved_before_the_next_one_is_drawn,
    ),
    "helpers count as noise": Mutant(
        edit(Roster.contributions.func, "member.weight > 0", "True"),  # type: ignore[attr-defined]
        targets.test_those_who_only_help_count_for_nothing_and_demand_nothing,
    ),
    "a leader seals what is too small": Mutant(
        edit(ballot.willing, "acks[m.id].fewest > roster.contributions", "False"),
        partial(targets.test_whoever_demands_more_than_there_are_is_left_out_by_name_until_all_agree, "fixed"),
    ),
    "the demand is not told": Mutant(
        edit(Voting.ack, "mine.fewest if mine else 0", "0"),
        partial(targets.test_whoever_demands_more_than_there_are_is_left_out_by_name_until_all_agree, "fixed"),
    ),
    "the simulator sums what is too small": Mutant(
        edit(ExactWorld.step, "max(who.fewest, smallest_sum_of(self.config) if is_masked(self.wire) else 0)", "0"),
        partial(targets.test_deaths_in_the_exchange_never_take_a_run_past_its_target, "bitwise", Observer.OUTSIDER),
    ),
    "noise that nobody knows of is counted": Mutant(
        edit(Account._least, "max(FEWEST if self._masks else 1, opened.fewest)", "5"),
        accounts.test_where_nobody_tells_how_much_noise_joined_its_own_none_is_counted,
    ),
    "a leader looks once": Mutant(
        edit(ballot.willing, "while (unwilling :=", "if (unwilling :="),
        partial(targets.test_whoever_demands_more_than_there_are_is_left_out_by_name_until_all_agree, "masked"),
    ),
    "a member joins what is too small": Mutant(
        edit(Membership._is_fair, "roster.contributions >= mine.fewest", "True"),
        partial(
            targets.test_a_member_sends_nothing_to_a_roster_smaller_than_it_demands_whatever_its_leader_says, "masked"
        ),
    ),
    "one share too few is demanded": Mutant(
        edit(Spending.fewest, "return high", "return max(1, high - 1)"),
        partial(
            targets.test_whatever_becomes_of_its_vectors_a_peers_own_ledger_keeps_the_target,
            observer=Observer.INSIDER_MASKED,
        ),
    ),
    "noise not scaled for the tolerated loss": Mutant(
        edit(calibration.NoisePlan.survivors.fget, "(1 - self.tolerated_loss) * self.peers", "self.peers"),  # type: ignore[attr-defined]
        mechanisms.test_the_means_noise_has_the_promised_deviation_within_3_percent,
    ),
    "no noise on the indicator": Mutant(
        edit(
            mechanism.blur, "share.add_(contribution)", "share.index_fill_(0, torch.tensor([-1]), 0).add_(contribution)"
        ),
        mechanisms.test_the_indicators_noise_has_the_promised_deviation_within_3_percent,
    ),
    "noise in floating point": Mutant(
        edit(
            mechanism.blur,
            "torch.from_numpy(discrete_gaussian(contribution.numel(), lattice.variance, words, lattice.width))",
            "(torch.randn(contribution.numel()) * lattice.variance ** 0.5).long()",
        ),
        mechanisms.test_the_low_bits_of_what_is_sent_do_not_tell_an_update_from_nothing,
    ),
    "noise and update are added in floating point": Mutant(
        edit(mechanism.blur, "share.add_(contribution)", "(share.float() + contribution.float()).long()"),
        mechanisms.test_the_low_bits_of_what_is_sent_do_not_tell_an_update_from_nothing,
    ),
    "noised values are clamped": Mutant(
        edit(mechanism.blur, "share.add_(contribution)", "(share.double() + contribution).clamp(-2e18, 2e18).long()"),
        mechanisms.test_noise_that_leaves_the_field_wraps_and_is_not_clamped,
    ),
    "less noise by rounding": Mutant(
        edit(lattices.lattice_of, "math.ceil(exact * (1 + 2.0 ** (-40))) + ROUNDING_VARIANCE", "math.floor(exact)"),
        lattice_tests.test_the_noise_is_never_less_than_sigma_promises_and_hardly_more,
    ),
    "values are rounded, not truncated": Mutant(
        edit(mechanism._truncated, "mul_(scale)", "mul_(scale).round_()"),
        mechanisms.test_values_are_truncated_towards_zero,
    ),
    "a norm is not looked at again in integers": Mutant(
        edit(mechanism.truncate, "> steps ** 2", "> math.inf")
        + edit(mechanism._truncated, "mul_(scale)", "mul_(scale * 1.0001)"),
        mechanisms.test_a_norm_in_integers_never_exceeds_the_bound_not_even_by_rounding,
    ),
    "a band that is not sure is taken": Mutant(
        edit(gaussians.Staircase._begins, "low != high", "low != low"),
        partial(gaussian_tests.test_a_number_at_the_edge_of_a_band_is_not_taken_from_the_table),
    ),
    "a fifth less noise": Mutant(
        edit(mechanism.blur, "share.add_(contribution)", "(share * 0.8).long().add_(contribution)"),
        audits.test_nobody_learns_more_of_a_record_than_is_claimed_where_all_are_in_the_batch,
    ),
    "a ledger goes on under another unit": Mutant(
        edit(Account.__init__, "(before := saved.get('unit', 'peer')) != unit", "(before := unit) != unit"),
        accounts.test_a_ledger_of_another_unit_is_refused_because_the_two_do_not_add_up,
    ),
    "colluders know nothing of what was told before they were assumed": Mutant(
        edit(Spending.__init__, ".told_by(self.noise.colluders)", ""),
        accounts.test_colluders_that_are_assumed_later_know_their_shares_of_earlier_releases,
    ),
    "a vector that left is forgotten when the run goes back": Mutant(
        edit(Account.settle, "self._left or _began(voter, opened)", "_began(voter, opened)"),
        accounts.test_a_vector_that_left_counts_though_the_run_went_back_and_this_peer_only_helped_since,
    ),
    "records are clipped together": Mutant(
        edit(
            records.add_records,
            "norms = torch.stack(",
            "layers = [layer.sum(dim=0, keepdim=True) for layer in layers]; norms = torch.stack(",
        ),
        audits.test_nobody_learns_more_of_a_record_than_is_claimed_whatever_the_others_are,
    ),
    "batches that are no secret": Mutant(
        edit(records.Sampling.draw, "words(count) < np.uint64(limit)", "np.arange(count) >= 0"),
        audits.test_a_secret_sample_hides_a_record_as_well_as_is_claimed,
    ),
    "the sum of records is truncated, not each": Mutant(
        edit(records._add_layer, "trunc_().sum(dim=0)", "sum(dim=0).trunc_()"),
        record_tests.test_every_record_is_truncated_towards_zero_before_they_are_added,
    ),
    "masks of dropout by the place in the batch": Mutant(
        edit(RecordAgreement.of_records, "secret.sample(len(rows)).view(np.int64).copy()", "np.arange(len(rows))"),
        record_runs.test_a_records_dropout_masks_are_secret_and_its_own,
    ),
    "a wider batch counts for more": Mutant(
        edit(RecordAgreement.of_records, "blur(total, ", "blur(total * 2, "),
        audits.test_nobody_learns_more_of_a_record_than_is_claimed_where_all_are_in_the_batch,
    ),
    "colluders keep their noise to themselves": Mutant(
        edit(Release._unknown, "others - self.colluders", "others"),
        ledgers.test_every_colluder_takes_its_share_of_the_noise_away,
    ),
    "sigma for the update alone": Mutant(
        edit(
            calibration.NoisePlan.update_multiplier.fget,  # type: ignore[attr-defined]
            "math.sqrt(1 - (self.noise_multiplier / (2 * self.indicator_deviation)) ** 2)",
            "1",
        ),
        calibration_tests.test_z_and_the_shares_match_values_worked_by_hand,
    ),
    "no clipping": Mutant(
        edit(mechanism.bound_contribution, "max(norm, bound)", "bound")
        + edit(mechanism.truncate, "> steps ** 2", "> math.inf"),
        mechanisms.test_an_update_beyond_the_bound_is_scaled_to_it_and_says_that_it_did_not_fit,
    ),
    "a NaN is not blurred": Mutant(
        edit(mechanism.bound_contribution, "math.isfinite(norm)", "True")
        + edit(mechanism.truncate, "> steps ** 2", "> math.inf"),
        partial(mechanisms.test_an_update_that_is_not_finite_counts_as_zero_that_did_not_fit, float("nan")),
    ),
    "noise from a seed": Mutant(
        edit(noise.system_words, "os.urandom(KEY_BYTES)", "np.random.bytes(KEY_BYTES)"),
        mechanisms.test_noise_from_the_os_cannot_be_repeated_by_any_seed,
    ),
    "a real peer's noise from the run's seed": Mutant(
        edit(
            Trainer.privatised,
            "system_words()",
            "lambda n: __import__('numpy').random.default_rng(1).integers(2**63, size=n).astype('u8')",
        ),
        runs.test_a_real_peers_noise_is_the_promised_share_and_follows_from_no_seed,
    ),
    "amplified by a roster that everybody sees": Mutant(
        edit(
            Spending.add,
            "self.noise.release(arrived)",
            "__import__('dataclasses').replace(self.noise.release(arrived), sampling=0.75)",
        ),
        runs.test_every_row_holds_the_epsilons_of_what_arrived_so_far,
    ),
    "shares that were cut are counted, not those that arrived": Mutant(
        edit(Release._unknown, "self.arrived -", "self.peers -"),
        ledgers.test_noise_that_did_not_arrive_does_not_count,
    ),
    "an insider does not know its own noise": Mutant(
        edit(Release._unknown, "self.arrived - (observer is Observer.INSIDER_MASKED)", "self.arrived"),
        ledgers.test_a_masked_insider_knows_its_own_share_of_the_noise,
    ),
    "an abandoned iteration costs nobody anything": Mutant(
        edit(Release.event, "observer is not Observer.INSIDER and (not self.arrived)", "not self.arrived"),
        ledgers.test_an_abandoned_iteration_costs_only_what_group_members_saw,
    ),
    "losses are told": Mutant(
        edit(Simulation._row, "step.losses and (not self.spending)", "step.losses"),
        runs.test_a_private_run_directory_holds_no_losses_and_no_table_of_labels,
    ),
    "labels are told": Mutant(
        edit(Simulation._write_split, " or self.spending is not None", ""),
        runs.test_a_private_run_directory_holds_no_losses_and_no_table_of_labels,
    ),
}


@pytest.fixture(autouse=True)
def _nothing_computed_by_a_mutant_is_left() -> Iterator[None]:
    yield
    for cached in (graph.degree, graph.neighbours):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


@pytest.mark.parametrize("name", [*MASKS, *LIARS, *PRIVACY])
def test_the_rule_has_a_test_that_notices(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutant = (MASKS | LIARS | PRIVACY)[name]
    test, store = mutant.test, StateDir(tmp_path / "store", "run")
    fixtures = {"monkeypatch": monkeypatch, "tmp_path": tmp_path, "store": store}
    wanted = inspect.signature(test).parameters
    mutate(mutant.edits, monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**{name: value for name, value in fixtures.items() if name in wanted})
    store.close()
