"""The options of a library peer: everything about it but its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from marfl.errors import InputError
from marfl.learn.strategy import PLAIN, Plain, Strategy, load_strategy
from marfl.peer.federated_metrics import checked_names
from marfl.peer.record_privacy import check_records
from marfl.protocol.protocol_settings import Settings
from marfl.schema import validated
from marfl.settings import Joining, Network, Privacy, RunTerms
from marfl.wire.packing import MASKED, is_small

if TYPE_CHECKING:
    from marfl.net.libp2p.transport import Libp2pNet


@dataclass(frozen=True)
class PeerOptions(Joining, RunTerms):
    """Everything about a library peer but its model. The signature of `marfl.Peer` has the same names and defaults."""

    masks: Annotated[bool, Field(description="only the sum over all is ever seen, by anybody")] = False
    privacy: Annotated[
        Mapping[str, Any] | None, Field(description="settings of [privacy]: what leaves is clipped and noised")
    ] = None
    records: Annotated[
        Any, Field(description="marfl.RecordData, with privacy of one record: the data, and the loss of one record")
    ] = None
    strategy: Annotated[
        Any, Field(description="what a mean does: plain, diloco, fedadam, fedyogi, module:Class, or a marfl.Strategy")
    ] = "plain"
    local: Annotated[
        tuple[str, ...],
        Field(description="layers that stay at home, by name or pattern such as head.*: nothing of them travels"),
    ] = ()
    metrics: Annotated[
        tuple[str, ...], Field(description="names of numbers that are averaged along with the model; see mean()")
    ] = ()
    state_dir: Annotated[
        Path | None,
        Field(
            description="where key, model, iteration and what is left of small integers survive a restart, and what a "
            "private peer has given away"
        ),
    ] = None
    progress: Annotated[bool, Field(description="a bar on the terminal while others are waited for")] = False
    index: Annotated[
        int | None, Field(description="the place in the order; by default one from the peer's id")
    ] = None
    join_patience: Annotated[float, Field(ge=0, description="seconds to wait for somebody to answer")] = 60.0
    network: Network = field(default_factory=Network)

    @classmethod
    def of(cls, **options: Any) -> PeerOptions:
        """From keyword arguments: lists and single addresses, paths as text, and every `[network]` setting by name."""
        own = {name: options.pop(name) for name in [field.name for field in fields(cls)] if name in options}
        for name in ("join", "listen", "metrics", "local"):
            own[name] = _texts(own.get(name, ()))
        for name in ("identity", "token", "state_dir"):
            own[name] = Path(own[name]) if own.get(name) is not None else None
        if isinstance(own.get("privacy"), Privacy):
            usual = asdict(Privacy())
            own["privacy"] = {name: value for name, value in asdict(own["privacy"]).items() if value != usual[name]}
        check_records(own.get("privacy"), own.get("records"))
        if own.get("privacy") and own["state_dir"] is None:
            raise InputError("Peer: privacy needs state_dir: what was given away is kept there")
        if own.get("privacy") and is_small(own.get("wire", "fp32")):
            raise InputError(f"Peer: wire = {own['wire']}: what it leaves tells of the data; with privacy take fixed")
        if own.get("run") == "":
            raise InputError("run: needs a name, by which its peers find each other")
        own["strategy"] = _strategy(own.get("strategy", PLAIN), private=bool(own.get("privacy")))
        if own["local"] and own.get("records") is not None:
            raise InputError("Peer: local: with records no layer stays at home; leave one of them out")
        made = cls(**own, network=validated(Network, options))
        checked_names(made.metrics, private=bool(made.privacy), small=is_small(made.wire))
        return made

    async def start_net(self) -> Libp2pNet:
        """A listening net that has joined nobody yet."""
        try:  # hivemind takes a second: only for those who really join a swarm
            from marfl.net.libp2p.admission import admission_of
            from marfl.net.libp2p.connection import Libp2pSettings
            from marfl.net.libp2p.p2pd import check_addresses
            from marfl.net.libp2p.transport import Libp2pNet
        except ImportError as error:
            raise InputError(f"Peer: {error.name} is not installed (pip install 'marfl[swarm]')") from error
        sockets = Libp2pSettings.of(self.network, self.listen, self.identity)
        check_addresses(replace(sockets, join=self.join))
        return await Libp2pNet.start(sockets, admission_of(self.run, self.authority, self.token))

    def settings(self) -> Settings:
        """What the protocol takes of these."""
        terms = {field.name: getattr(self, field.name) for field in fields(RunTerms)}
        wire = "fixed" if self.privacy and not is_small(self.wire) else self.wire
        if self.masks:
            wire = MASKED + wire if is_small(wire) else "masked"
        terms |= {"wire": wire, "alike": self.privacy is not None}
        return Settings(**terms | self.network.patience())


def _strategy(given: Strategy | str, *, private: bool) -> Strategy:
    """What a mean does to the model; one that changes local steps is refused: those are the user's."""
    strategy = load_strategy(given) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy):
        raise InputError(f"Peer: strategy = {given!r:.60}: must be a name, or a marfl.Strategy")
    if strategy.is_local:
        raise InputError(
            f"Peer: strategy = {strategy}: changes local steps, and those are yours; choose diloco, fedadam or fedyogi"
        )
    if private and not isinstance(strategy, Plain):
        raise InputError(f"Peer: strategy = {strategy}: with privacy choose plain, or run marfl peer, which has both")
    return strategy


def _texts(value: Any) -> Any:
    """One text or several as a tuple; what is neither is left for the check of all options to name."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else value
