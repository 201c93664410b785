"""The options of a library peer: everything about it but its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marfl.errors import InputError
from marfl.peer.network import NetworkConfig, network_config
from marfl.protocol.settings import Settings

if TYPE_CHECKING:
    from marfl.net.libp2p.transport import Libp2pNet


@dataclass(frozen=True)
class PeerOptions:
    """Everything about a library peer but its model."""

    run: str = "run"
    join: tuple[str, ...] = ()  # addresses of peers of the run; a first peer needs none
    group_size: int = 5  # M in the paper
    exchange: str = "grid"
    wire: str = "fp32"  # how values travel: "fixed" sums integers, exactly
    max_weight: float = 1e6  # the most that one peer's update may count: see `weight` of `aggregate`
    masks: bool = False  # only the sum over all is ever seen, by anybody: integers under masks
    privacy: Mapping[str, Any] | None = None  # settings of `[privacy]`: what leaves is clipped and noised
    state_dir: Path | None = None  # of a private peer: what it has given away is kept here
    expected: int = 0  # wait for so many peers before the first iteration; 0: begin with whoever is there
    index: int | None = None  # the place in the order; by default one from the peer's id
    listen: tuple[str, ...] = ()  # loopback by default; /ip4/0.0.0.0/tcp/0 for a network
    identity: Path | None = None  # key file, its votes beside it; by default a new key every time
    token: Path | None = None
    authority: str | None = None  # of a closed run, in hex
    join_patience: float = 60.0  # seconds to wait for somebody to answer
    network: NetworkConfig = field(default_factory=NetworkConfig)

    @classmethod
    def of(cls, **options: Any) -> PeerOptions:
        """From keyword arguments: lists and single addresses, paths as text, and any `[network]` setting by name."""
        own = {name: value for name, value in options.items() if name in cls.__dataclass_fields__ and name != "network"}
        rest = {name: value for name, value in options.items() if name not in own and name != "network"}
        for name in ("join", "listen"):
            own[name] = _texts(own.get(name, ()))
        for name in ("identity", "token", "state_dir"):
            own[name] = Path(own[name]) if own.get(name) is not None else None
        base = options.get("network") or NetworkConfig()
        unknown = rest.keys() - NetworkConfig.model_fields.keys()
        if unknown:
            allowed = ", ".join([*cls.__dataclass_fields__, *NetworkConfig.model_fields])
            raise InputError(f"Peer: {sorted(unknown)[0]} is not an option; there are {allowed}")
        if bool(own.get("privacy")) != (own["state_dir"] is not None):
            raise InputError("Peer: privacy and state_dir go together: what was given away is kept there")
        return cls(**own, network=network_config(base.model_dump() | rest))

    async def start_net(self) -> Libp2pNet:
        """A listening net that has joined nobody yet."""
        try:  # hivemind takes a second: only for those who really join a swarm
            from marfl.net.libp2p.admission import admission_of
            from marfl.net.libp2p.p2pd import check_addresses
            from marfl.net.libp2p.transport import Libp2pNet
        except ImportError as error:
            raise InputError(f"Peer: needs the swarm's packages, and {error.name} is not installed") from error
        sockets = self.network.sockets(self.listen, self.identity)
        check_addresses(replace(sockets, join=self.join))
        return await Libp2pNet.start(sockets, admission_of(self.run, self.authority, self.token))

    def settings(self) -> Settings:
        return Settings(
            run=self.run, group_size=self.group_size, exchange=self.exchange,
            wire="masked" if self.masks else self.wire,
            max_weight=self.max_weight,
            expected=self.expected,
            **self.network.patience(),
        )  # fmt: skip


def _texts(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
