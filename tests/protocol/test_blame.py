"""Who is left out of the next roster, in a table of what the votes say; and whoever let others wait is asked last."""

from __future__ import annotations

import pytest

from marfl.net.virtual import Delivery, Departure
from marfl.protocol.ballot import ACCUSES_ALONE, ACCUSES_MANY, culprits
from marfl.protocol.messages import Ack, Complaint, Sync
from marfl.protocol.protocol_settings import Settings
from stages.forgery import an_ack
from stages.masks import Stage

LATE = "its data did not arrive"


def ack(
    blamed: tuple[str, ...] = (), *, waits: bool = False, unsent: tuple[str, ...] = (), done: bool = False
) -> Ack:
    complaints = tuple(Complaint(peer, LATE, False) for peer in blamed)
    return an_ack(blamed=complaints, waits=waits, unsent=unsent, accepted_hash=bytes(32) if done else None)


@pytest.mark.parametrize(
    ("acks", "left_out"),
    [
        ({"a": ack(("b",), waits=True), "d": ack(("b",), waits=True), "b": ack()}, {"b"}),  # the root of the waiting
        ({"a": ack(("b",), waits=True), "b": ack(("c",), waits=True), "c": ack(unsent=("b",))}, {"c"}),
        ({"a": ack(("b",), waits=True), "b": ack()}, set()),  # one peer's word, and the other's silence
        (  # held up by somebody who is silent
            {"a": ack(("b",), waits=True), "d": ack(("b",), waits=True), "b": ack(unsent=("c",))}, set()
        ),
        (  # held up by somebody with a bad link, whom others cannot reach either
            {"a": ack(("b",), waits=True), "d": ack(("b",), waits=True), "b": ack(unsent=("c",)),
             "c": ack(waits=True), "e": ack(("c",), waits=True, unsent=("c",)), "f": ack(waits=True, unsent=("c",))},
            {"c"},
        ),
        ({"a": ack(("b",), waits=True), "b": ack(unsent=("a", "d", "c")), "d": ack()}, {"b"}),  # its own link is bad
        ({"a": ack(("b",), waits=True), "b": ack(done=True)}, set()),
        (  # a cannot reach b and waits for it, and c for a: either end may be to blame
            {"a": ack(("b",), waits=True, unsent=("b",)), "b": ack(waits=True), "c": ack(("a",), waits=True)}, set()
        ),
        (  # a cannot reach b, which several miss: it is not a's link
            {"a": ack(("b",), waits=True, unsent=("b",)), "b": ack(waits=True), "c": ack(("b",), waits=True),
             "d": ack(("a",), waits=True), "e": ack(("a",), waits=True)},
            {"b"},
        ),
        (  # a is slow: b waits for it, and others for b
            {"a": ack(unsent=("b",)), "b": ack(("a",), waits=True), "c": ack(("b",), waits=True),
             "d": ack(("b",), waits=True)},
            {"a"},
        ),
        ({"a": ack(("b",), waits=True, unsent=("b",)), "b": ack(), "c": ack()}, set()),  # a's word alone
        (  # one message of a did not get through to b; s, whom others wait for, is silent, and is left out for that
            {"a": ack(unsent=("b",)), "b": ack(("c",), waits=True), "c": ack(("s",), waits=True),
             "d": ack(("a",), waits=True), "e": ack(("s",), waits=True)},
            set(),
        ),
    ],
)  # fmt: skip
def test_whoever_is_held_up_by_others_is_not_left_out_for_it(acks: dict[str, Ack], left_out: set[str]):
    assert set(culprits(acks, patient=True)) == left_out


def test_what_was_missed_is_fetched_from_somebody_who_did_not_let_me_wait_for_it() -> None:
    stage = Stage(5, settings=Settings(run="run", exchange="grid", group_size=3, wire="fixed"))
    leaders: list[str] = []
    victims: list[str] = []
    asked: list[str] = []

    def watch(event: Departure, delivery: Delivery) -> None:
        """The leader's results reach one member, and what that member asks it for, half a minute late."""
        channel = event.tag.channel
        if channel == "propose" and not leaders:
            leaders.append(event.source)
        if channel == "gather" and event.source in leaders and not victims:
            victims.append(event.dest)
        if event.source in leaders and event.dest in victims and channel in ("gather", "resend", "sync"):
            delivery.delay = 30.0
        if event.op == "call" and channel == "sync" and event.source in victims:
            asked.extend([] if Sync.decode(delivery.parcel.header).light else [event.dest])

    stage.watch = watch
    outcomes = stage.play()
    assert outcomes[victims[0]].holds
    assert asked
    assert asked[0] not in leaders


def test_when_patience_ends_a_complaint_that_nobody_shares_costs_both() -> None:
    acks = {"a": ack(("b",), waits=True), "b": ack(), "c": ack()}
    assert set(culprits(acks, patient=False)) == {"a", "b"}
    shared = {"a": ack(("b",), waits=True), "b": ack(("c",), waits=True), "c": ack(("b",), waits=True)}
    assert set(culprits(shared, patient=False)) == {"b"}


def test_of_two_that_wait_for_each_other_the_one_goes_that_those_above_suspicion_wait_for() -> None:
    waiting = {"a": "g", "b": "e", "c": "a", "d": "g", "e": "g", "f": "a", "g": "a"}  # a and g: three complaints each
    acks = {peer: ack((late,), waits=True) for peer, late in waiting.items()}
    assert set(culprits(acks, patient=False)) == {"a"}  # of c and f nobody complains, of g's accusers only d



NAN = "a chunk with NaN or infinity"


def caught(*names: str) -> Ack:
    return an_ack(blamed=tuple(Complaint(name, NAN, True) for name in names))


@pytest.mark.parametrize(
    ("acks", "left_out"),
    [
        ({"a": caught("d"), "b": caught("d"), "c": ack(), "d": ack()}, {"d": NAN}),
        ({"a": caught("b", "c", "d"), "b": ack(), "c": ack(), "d": ack()}, {"a": ACCUSES_MANY}),
        ({"a": caught("b"), "b": ack(), "c": ack()}, {"a": ACCUSES_ALONE, "b": f"{NAN}, says a"}),
        ({"a": caught("d"), "b": caught("c", "d"), "c": ack(), "d": ack()},
         {"d": NAN, "b": ACCUSES_ALONE, "c": f"{NAN}, says b"}),
        ({"a": caught("a"), "b": ack()}, {}),
        ({"a": caught("b", "c", "d"), "b": caught("a"), "c": ack(), "d": ack()}, {"a": ACCUSES_MANY}),
    ],
)  # fmt: skip
def test_nobody_is_left_out_for_bad_data_on_one_word_alone(
    acks: dict[str, Ack], left_out: dict[str, str]
) -> None:
    assert culprits(acks, patient=True) == left_out
