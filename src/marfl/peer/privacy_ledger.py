"""What a real peer has given away: one noised vector per iteration, and a ledger on the disk before anything leaves.

Noise comes from the OS. A second try of an iteration sends the very same vector. After a crash that vector is gone, so
the next one is another release, and the first is counted as seen by group members. A peer cannot always find out how
many shares of noise joined its own. Then it counts the smallest possible number: none; three in a masked sum; with a
target ε the number that it demands, since it brings its vector to no smaller roster (`Contribution.fewest`). So the
target holds whatever happens.

`Account` is the ledger. `Private` is differential privacy for the library's peer: the sound mechanism on whatever a
training loop has learned. Its update is all that the model has changed since it was the agreed one. Nothing of it is
public, so all of it is clipped and noised; the optimizer stays the user's own. What was given away is written down in a
state directory, so that a budget survives the process, even where the peer has a new name in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from marfl.config import Config, load
from marfl.dp.ledger import Spending
from marfl.dp.noise import system_words
from marfl.dp.privacy_settings import sound_of
from marfl.dp.private_agreement import CLIP, PrivateAgreement, RecordAgreement, agreement_of
from marfl.errors import InputError
from marfl.learn.local_work import LocalWork
from marfl.net.base import PeerId
from marfl.peer.record_privacy import RecordData, RecordSums
from marfl.peer.state_dir import StateDir
from marfl.protocol.exchange import Contribution
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.participant import Participant
from marfl.schema import settings_of
from marfl.secagg.graph import FEWEST
from marfl.settings import Privacy
from marfl.state import LayerSlot, Layout, Snapshot, layout_of

ENDLESS = 10**9  # iterations: a training loop does not say how many it will make


@dataclass(frozen=True)
class Open:
    """A vector that may have left, in an iteration whose end this peer has not accounted for."""

    iteration: int
    base: str  # hash of the state it starts from, in hex
    fewest: int = field(default=0, compare=False)  # contributions that any total has which holds it
    peer: str = field(default="", compare=False)  # what others called me then, where that may change


class Account:
    """One peer's own ledger. What is not on the disk has not left."""

    def __init__(self, config: Config, store: StateDir, name: str = "") -> None:
        """`name` is this peer's, where it has another one after every restart."""
        unit = config.privacy.unit
        saved: dict[str, Any] = store.load_account() or {"unit": unit, "releases": [], "open": None}
        if (before := saved.get("unit", "peer")) != unit:
            raise InputError(
                f"privacy.unit = {unit}: {store.path} holds a ledger of what was told about one {before}, and the two "
                "do not add up; begin in another directory, where what was spent here is not counted"
            )
        self.spending = Spending(config, saved["releases"])
        self._store, self._name, self._masks, self._unit = store, name, config.privacy.masks, unit
        self._open = Open(**saved["open"]) if saved["open"] else None
        self._vector: Tensor | None = None
        self._blind = self._open is not None  # after a crash: nobody knows what became of that vector
        self._left = False  # an exchange with it began here

    def draw(self, iteration: int, base: bytes, make: Callable[[], Tensor]) -> Tensor:
        """The vector of this iteration from this state: made once, and written down before it can leave."""
        again = self._open == Open(iteration, base.hex())
        if again and self._vector is not None:
            return self._vector
        if (pending := self._pending(iteration, base)) is not None:
            self.spending.add(pending)
        self._open = Open(iteration, base.hex(), self.spending.fewest(), self._name)
        self._vector, self._blind, self._left = make(), self._blind and again, self._left and again
        self._save()
        return self._vector

    def affords(self, iteration: int, base: bytes, *, horizon: bool = True) -> bool:
        """Whether the vector of this iteration keeps the target, whatever became of one that is still open.

        `horizon`: nor goes beyond the last iteration that a peer which takes part in all can afford.
        """
        return self.spending.affords(iteration if horizon else None, pending=self._pending(iteration, base))

    @property
    def fewest(self) -> int:
        """The fewest contributions of a sum that the vector drawn last may be in."""
        return self._open.fewest if self._open else 0

    def _pending(self, iteration: int, base: bytes) -> int | None:
        """Shares of noise with a vector that is open beside the one wanted now; None where there is none."""
        if self._open is None:
            return None
        if self._open == Open(iteration, base.hex()):
            # Only one of the two can be in the total, but group members may have seen both.
            return 0 if self._vector is None else None
        return self._least(self._open)

    def _least(self, opened: Open) -> int:
        """Shares of noise to count where nobody tells how many there were: no total with that vector has fewer."""
        return max(FEWEST if self._masks else 1, opened.fewest)

    def settle(self, voter: Participant) -> list[str]:
        """Account for the open vector once its iteration is decided; what a reader of the row should know."""
        opened = self._open
        if opened is None:
            return []
        self._left = self._left or _began(voter, opened)  # later exchanges, in which I only help, make the voter forget
        if voter.record.iteration < opened.iteration:
            return []
        arrived, least = self._arrived(voter, opened), self._least(opened)
        forgotten = self._blind and (self._vector is None or arrived is None)
        begun = forgotten or self._left
        self._open, self._vector, self._blind, self._left = None, None, False, False
        if arrived or begun:
            self.spending.add(arrived if arrived is not None else least)
        self._save()
        if arrived is None and begun:
            counted = f"the fewest that it can be, {least}" if least > 1 else "none"
            return [f"how much noise joined this peer's own is not known: counted as {counted}"]
        return self.spending.checks(arrived or 0)

    def _arrived(self, voter: Participant, opened: Open) -> int | None:
        """Shares of noise in the total that holds mine; 0 if none does, None if nobody told."""
        record = voter.history.get(opened.iteration)
        roster = record.roster if record else None
        if roster is None or roster.base.hex() != opened.base:
            return None
        mine = roster.ranks.get(opened.peer or voter.net.me)
        if mine is not None and roster.members[mine].weight:
            return roster.contributions
        if not roster.is_sum and self._masks:
            # Masks may have come off before the iteration was abandoned, or the run went back in it: then somebody has
            # seen the total.
            helped = voter.helped.get(opened.iteration)
            return None if self._blind else helped.contributions if helped else 0
        return 0

    def _save(self) -> None:
        opened = self._open
        self._store.save_account(
            {
                "unit": self._unit,
                "releases": self.spending.ledger.to_rows(),
                "open": asdict(opened) if opened else None,
            }
        )


def _began(voter: Participant, opened: Open) -> bool:
    """Whether an exchange with that vector began here."""
    roster = voter.last_roster
    return roster is not None and (roster.iteration, roster.base.hex()) == (opened.iteration, opened.base)


class Spent(NamedTuple):
    """What a peer has given away so far."""

    epsilons: dict[str, float]  # by observer
    all: bool  # the target has no room for another iteration


NOTHING_SPENT = Spent({}, False)


class Private:
    """What a private peer sends, and the ledger of it: `begin` comes first."""

    def __init__(
        self, privacy: Mapping[str, Any], wire: str, records: RecordData | None = None, model: nn.Module | None = None
    ) -> None:
        self.config = privacy_config(privacy, masks=wire == "masked", more=records.settings() if records else {})
        self.agreement = PrivateAgreement(LocalWork(), "local", sound=sound_of(self.config), trainable=0)
        self._sums: RecordSums | None = None
        if records is not None and model is not None:
            self._sums = RecordSums(model, records)
            found = agreement_of(self.config, LocalWork(records.optimizer), layout_of(model).length)
            assert isinstance(found, RecordAgreement)
            self.agreement = found
        self._wire = wire

    def begin(self, store: StateDir, name: PeerId) -> None:
        """Go on with the ledger in this directory, as a peer of this name."""
        self._account = Account(self.config, store, name)

    def layout(self, model: Layout) -> Layout:
        """With the indicator as one more value, named after the settings: peers with others are not averaged with."""
        own = ("masks", "mode", "delta", "target_epsilon", "target_observer", "colluders")
        given = {name: value for name, value in asdict(self.config.privacy).items() if name not in own}
        if self._sums is not None:
            given |= {"batch": self.config.batch, **asdict(self.config.optimizer)}
        settings = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
        more = self.agreement.values(model.length) - model.length
        return Layout((*model.slots, LayerSlot(f"privacy ({settings})", (more,), "float32", model.length)))

    def contribution(self, state: Snapshot, delta: Tensor) -> tuple[Contribution | None, str]:
        """What to bring to the next iteration, drawn once; else None, and why."""
        account, iteration = self._account, state.version + 1
        if self._sums is not None and bool(delta.any()):
            raise InputError("Peer: with records the model is stepped by aggregate() alone, but it has changed since")
        if not self._affords(state):
            return None, account.spending.why_stopped
        make = partial(self._vector, state, delta)
        vector = account.draw(iteration, state.hash, make)
        if not can_carry(self._wire, vector):
            return None, abstains(self._wire)
        return Contribution(state.hash, vector, fewest=account.fewest), ""

    def _vector(self, state: Snapshot, delta: Tensor) -> Tensor:
        bound, iteration = state.scalars[CLIP], state.version + 1
        if self._sums is not None and isinstance(self.agreement, RecordAgreement):
            return self._sums.draw(self.agreement, state.vectors["theta"], bound)
        return self.agreement.privatised(delta, delta, iteration, bound, system_words())

    def settle(self, voter: Participant) -> Spent:
        """Account for what became of it, and say how much is spent."""
        self._account.settle(voter)
        spending = self._account.spending
        found = {str(observer): epsilon for observer, epsilon in spending.ledger.epsilons(spending.delta).items()}
        return Spent(found, not self._affords(voter.state))

    def _affords(self, state: Snapshot) -> bool:
        """Whether the next iteration keeps the target; everybody goes by its own ledger, there is no common end."""
        return self._account.affords(state.version + 1, state.hash, horizon=False)


def privacy_config(privacy: Mapping[str, Any], *, masks: bool, more: Mapping[str, Any]) -> Config:
    """The `[privacy]` table of a run in sound mode, checked; `shares` must be said, because nobody else knows it."""
    allowed = settings_of(Privacy).keys() - {"mode", "masks", "smallest_sum"}
    for name in privacy:
        if name not in allowed:
            raise InputError(f"Peer: privacy has no setting {name}; there are {', '.join(sorted(allowed))}")
    for name in ("noise_multiplier", "shares"):
        if privacy.get(name) is None:
            raise InputError(f"Peer: privacy needs {name}; shares is the number of peers that should take part")
    given = {f"privacy.{name}": value for name, value in privacy.items()}
    fixed = {"privacy.masks": masks, "peers": privacy["shares"], "iterations": ENDLESS}
    return load(overrides={**more, **given, **fixed})
