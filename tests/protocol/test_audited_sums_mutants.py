"""Mutants of audits, each with one rule broken: a test must notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import test_audited_sums
import test_rollback
import test_way_back
from marfl.protocol import audit, former_states, fraud, signed_slices
from marfl.protocol.access import Gatekeeper
from marfl.protocol.leader import Leader
from marfl.protocol.member import Membership
from marfl.protocol.participant import Participant
from marfl.protocol.signed_slices import AuditBook
from marfl.protocol.standing import Standing
from stages.mutation import Edit, mutate

MUTANTS: dict[str, tuple[Edit, Callable[[], None]]] = {
    "signatures in a proof are not checked": (
        Edit(fraud.check_fraud, "not verify(proof.culprit, signed.statement, signed.signature)", "False"),
        test_audited_sums.test_nobody_else_can_sign_an_owners_word,
    ),
    "an auditor believes any word": (
        Edit(fraud.examined, "not verify(culprit, said.statement, said.signature)", "False"),
        test_audited_sums.test_nobody_else_can_sign_an_owners_word,
    ),
    "any two statements contradict each other": (
        Edit(fraud._check_contradiction, "not contradicts(*proof.said)", "False"),
        test_audited_sums.test_two_votes_in_one_attempt_are_proof_and_votes_in_two_are_not,
    ),
    "a right sum is proof as well": (
        Edit(fraud._check_sum, "(cells if proof.output else slice_hash(cells)) == right", "False"),
        test_audited_sums.test_a_right_sum_is_no_proof_however_it_is_shown,
    ),
    "a proof may show any values": (
        Edit(fraud._shown, "shown.cells[at:at + len(cells)] != cells", "False"),
        test_audited_sums.test_a_sender_that_signs_two_slices_cannot_make_an_honest_owner_a_liar,
    ),
    "an auditor compares other values than the owner used": (
        Edit(fraud.examined, "tuple(map(slice_hash, cells)) != word.hashes", "False"),
        test_audited_sums.test_a_sender_that_signs_two_slices_cannot_make_an_honest_owner_a_liar,
    ),
    "inputs need no signature": (
        Edit(fraud.is_signed, "return verify(", "return True or verify("),
        test_audited_sums.test_an_owner_that_makes_up_an_input_is_proven_a_liar,
    ),
    "what a sender keeps is not claimed": (
        Edit(fraud.said_of, "in ranges_of(signed)}", "in ranges_of(signed)[1:]}"),
        test_audited_sums.test_an_owner_that_chooses_its_own_input_afterwards_contradicts_itself,
    ),
    "a slice's signature is not checked when it comes": (
        Edit(AuditBook.take, "not self.is_claimed(source, slot.done)", "False"),
        test_audited_sums.test_a_slice_with_a_bad_signature_is_bad_data_and_its_sender_is_named,
    ),
    "what was not verified as it came never is": (
        Edit(AuditBook.is_claimed, "return self._verify(", "return True or self._verify("),
        test_audited_sums.test_who_signs_nothing_and_is_not_found_out_at_once_is_named_by_those_who_are_audited,
    ),
    "whoever holds a wrong sum does not look at its signature": (
        Edit(AuditBook.keep_for, "if not self.is_claimed(rank, done)]", "if False]"),
        test_audited_sums.test_an_owner_that_signs_nothing_of_its_wrong_sum_is_named_by_those_who_hold_it,
    ),
    "everybody's dice choose the same claims": (
        Edit(AuditBook._is_checked, "self._sign(statement('spot checks', self.roster.digest))", "b'the same'"),
        partial(test_audited_sums.test_the_dice_that_choose_which_claims_are_verified_are_everybodys_own, 0.5),
    ),
    "a run goes back at its leader's word": (
        Edit(Membership._may_compute, "self.standing.may_take_back(roster)", "True"),
        test_rollback.test_a_leader_that_goes_back_without_a_proof_is_not_followed,
    ),
    "a run goes back again and again": (
        Edit(former_states.in_the_model, "roster.restores", "None"),
        partial(
            test_rollback.test_a_run_goes_back_before_the_first_lie_that_is_in_its_model,
            ["grid", "grid", "back to 1"], {2}, None,
        ),
    ),
    "a run goes back to a state that nobody has": (
        Edit(former_states.may_go_back, "newest - to <= WINDOW and ", ""),
        partial(
            test_rollback.test_a_run_goes_back_before_the_first_lie_that_is_in_its_model,
            ["grid"] * (former_states.WINDOW + 2), {2}, None,
        ),
    ),
    "the momentum stays when a run goes back": (
        Edit(former_states.went_back, "former.vectors", "now.vectors"),
        test_rollback.test_momentum_and_scalars_come_back_with_the_state,
    ),
    "states are kept for ever": (
        Edit(Standing._keep_state, "if at > record.iteration - window", "if at >= 0"),
        test_rollback.test_former_states_are_few_and_go_when_nobody_can_prove_a_lie_any_more,
    ),
    "nobody doubts a leader's word": (
        Edit(Participant._doubt, "standing.step_back()", "pass"),
        partial(test_way_back.test_few_peers_would_come_together_again_as_well, 7),
    ),
    "the state before is not kept until the next one is certain": (
        Edit(Standing._keep_state, "max(self._window, not self.proofs.settled)", "self._window"),
        partial(test_way_back.test_few_peers_would_come_together_again_as_well, 7),
    ),
    "whoever blames others is excused": (
        Edit(audit.Audits._audit, "owner if any(there) else None", "None"),
        test_audited_sums.test_whoever_blames_somebody_that_is_there_is_not_excused,
    ),
    "who cannot be asked any more is held against its owner": (
        Edit(audit.Audits._audit, "owner if any(there) else None", "owner"),
        test_audited_sums.test_nobody_is_blamed_for_what_somebody_who_is_gone_did_not_sign,
    ),
    "owners audit themselves": (
        Edit(signed_slices.auditors.__wrapped__, "other + (other >= part.rank)", "other"),
        test_audited_sums.test_the_committed_hash_decides_who_audits_what_and_nobody_audits_itself,
    ),
    "anybody may audit": (
        Edit(
            audit.is_auditor, "named.get(AuditPart(asked.rank, asked.round, asked.passing)) == sender", "True"
        ),
        test_audited_sums.test_strangers_and_members_who_audit_something_else_are_refused_and_counted,
    ),
    "liars are answered": (
        Edit(Gatekeeper.guarded, "sender in self.standing.banned", "False"),
        test_audited_sums.test_nobody_answers_a_liar_any_more_and_it_does_not_come_back,
    ),
    "liars vote": (
        Edit(Leader.lead, " - self.standing.banned.keys()", ""),
        test_audited_sums.test_nobody_answers_a_liar_any_more_and_it_does_not_come_back,
    ),
    "the dead take their auditors with them": (
        Edit(audit.not_shown, "if peer in acks]", "]"),
        partial(
            test_audited_sums.test_one_auditors_word_alone_costs_it_as_much_as_the_accused,
            {"a": test_audited_sums.ack("d"), "b": test_audited_sums.ack()},
            {},
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_test_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, test = MUTANTS[name]
    mutate([edit], monkeypatch)
    signed_slices.auditors.cache_clear()
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        test()
    signed_slices.auditors.cache_clear()
