"""Differential privacy for the library's peer: the sound mechanism on whatever a training loop has learned.

The update is all that the model has changed since it was the agreed one. Nothing of it is public, so all of it is
clipped and noised; the optimizer stays the user's own. What was given away is written down in a state directory before
it leaves, so that a budget survives the process. A library's peer may have another name in every process; its ledger
does not mind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from marfl.config import Config, PrivacyConfig, load
from marfl.errors import InputError
from marfl.learn.practice import Practice
from marfl.net.base import PeerId
from marfl.peer.account import Account
from marfl.peer.store import StateDir
from marfl.privacy.agreed import CLIP, PrivateAgreement
from marfl.privacy.noise import os_noise
from marfl.privacy.settings import sound_of
from marfl.protocol.exchange import Contribution
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.participant import Participant
from marfl.state import Layout, Slot, Snapshot

ENDLESS = 10**9  # iterations: a training loop does not say how many it will make


class Spent(NamedTuple):
    """What a peer has given away so far."""

    epsilons: dict[str, float]  # by observer
    all: bool  # the target has no room for another iteration


NOTHING_SPENT = Spent({}, False)


class Private:
    """What a private peer sends, and the ledger of it: `begin` comes first."""

    def __init__(self, privacy: Mapping[str, Any], wire: str) -> None:
        self.config = privacy_config(privacy, masks=wire == "masked")
        self.agreement = PrivateAgreement(Practice(), "local", sound=sound_of(self.config), trainable=0)
        self._wire = wire

    def begin(self, store: StateDir, name: PeerId) -> None:
        """Go on with the ledger in this directory, as a peer of this name."""
        self._account = Account(self.config, store, name)

    def layout(self, model: Layout) -> Layout:
        """With the indicator as one more value, named after the settings: peers with others are not averaged with."""
        given = self.config.privacy.model_dump(exclude={"masks", "mode", "delta", "target_epsilon", "target_observer"})
        settings = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
        return Layout((*model.slots, Slot(f"privacy ({settings})", (1,), "float32", model.length)))

    def contribution(self, state: Snapshot, delta: Tensor) -> tuple[Contribution | None, str]:
        """What to bring to the next iteration, drawn once; else None, and why."""
        account, iteration = self._account, state.version + 1
        if not self._affords(state):
            return None, account.spending.why_stopped
        make = partial(self.agreement.privatised, delta, delta, iteration, state.scalars[CLIP], os_noise)
        vector = account.draw(iteration, state.hash, make)
        if not can_carry(self._wire, vector):
            return None, abstains(self._wire)
        return Contribution(state.hash, vector, fewest=account.fewest), ""

    def settle(self, voter: Participant) -> Spent:
        """Account for what became of it, and say how much is spent."""
        self._account.settle(voter)
        spending = self._account.spending
        found = {str(observer): epsilon for observer, epsilon in spending.ledger.epsilons(spending.delta).items()}
        return Spent(found, not self._affords(voter.state))

    def _affords(self, state: Snapshot) -> bool:
        """Whether the next iteration keeps the target; everybody goes by its own ledger, there is no common end."""
        return self._account.affords(state.version + 1, state.hash, horizon=False)


def privacy_config(privacy: Mapping[str, Any], *, masks: bool) -> Config:
    """The `[privacy]` table of a run in sound mode, checked; `shares` must be said, because nobody else knows it."""
    allowed = PrivacyConfig.model_fields.keys() - {"mode", "masks"}
    for name in privacy:
        if name not in allowed:
            raise InputError(f"Peer: privacy has no setting {name}; there are {', '.join(sorted(allowed))}")
    for name in ("noise_multiplier", "shares"):
        if privacy.get(name) is None:
            raise InputError(f"Peer: privacy needs {name}; shares is the number of peers that should take part")
    given = {f"privacy.{name}": value for name, value in privacy.items()}
    return load(overrides=given | {"privacy.masks": masks, "peers": privacy["shares"], "iterations": ENDLESS})
