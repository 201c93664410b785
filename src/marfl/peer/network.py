"""How a real peer reaches the others, and how patient it is: the `[network]` table of a config file, and flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from marfl.config import nearest
from marfl.errors import InputError
from marfl.net.libp2p.connection import Libp2pSettings

_PATIENCE = (
    "ready_timeout", "call_timeout", "phase_timeout", "takeover", "minority_timeout", "iteration_timeout", "poll",
    "record_ttl", "on_minority", "sync_states",
)  # fmt: skip
_SOCKETS = (
    "announce", "nat_port_map", "auto_nat", "reachability", "relay", "auto_relay", "trusted_relays", "join_timeout",
    "dht_timeout",
)  # fmt: skip


class NetworkConfig(BaseModel):
    """The defaults are for loopback and local networks; times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_timeout: float = Field(120.0, ge=0, description="how long a run waits for its expected peers to begin")
    ready_timeout: float = Field(20.0, gt=0, description="how long an iteration waits for peers that still train")
    call_timeout: float = Field(5.0, gt=0, description="of a small request and its answer")
    phase_timeout: float = Field(10.0, gt=0, description="of one phase of an exchange")
    takeover: float = Field(2.0, gt=0, description="between one leader's silence and the next one's proposal")
    minority_timeout: float = Field(60.0, gt=0, description="without a majority, before the rest goes on alone")
    iteration_timeout: float = Field(180.0, gt=0, description="of a whole iteration, decided or not")
    poll: float = Field(0.25, gt=0, description="between two look-ups while waiting")
    record_ttl: float = Field(600.0, gt=0, le=86_400, description="how long the DHT remembers a peer's word")
    sync_states: float = Field(10.0, gt=0, description="whole states that one peer may fetch from this one in a minute")
    refresh: float = Field(15.0, gt=0, description="between two looks at who is there")
    on_minority: Literal["fork", "wait"] = Field("fork", description="without a majority: go on, or wait for it")
    announce: tuple[str, ...] = Field((), description="addresses to tell others where they differ from listen")
    nat_port_map: bool = Field(False, description="ask the router to forward a port")
    auto_nat: bool = Field(False, description="find out from others whether this peer can be dialled")
    reachability: Literal["auto", "public", "private"] = Field(
        "auto", description="whether others can dial this peer: find out, yes, or no (then through relays alone)"
    )
    relay: bool = Field(False, description="reach peers behind routers through relays")
    auto_relay: bool = Field(False, description="be reached through relays when behind a router")
    trusted_relays: tuple[str, ...] = Field((), description="addresses of peers that relay for this one")
    join_timeout: float = Field(10.0, gt=0, description="for each address")
    dht_timeout: float = Field(1.0, gt=0, description="for one request to one DHT node")

    @field_validator("announce", "trusted_relays", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """A flag has one text for all the addresses, with commas between them."""
        return given.split(",") if isinstance(given, str) else given

    def patience(self) -> dict[str, Any]:
        """The part that `marfl.protocol.settings.Settings` takes."""
        return {name: getattr(self, name) for name in _PATIENCE}

    def sockets(self, listen: tuple[str, ...], identity: Path | None) -> Libp2pSettings:
        """Where to listen, and how to get through routers; joining is done later, so that it can be tried again."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SOCKETS}
        return Libp2pSettings(identity=identity, **given | ({"listen": listen} if listen else {}))


def network_config(tree: Mapping[str, Any]) -> NetworkConfig:
    """Validate a `[network]` table; the first thing wrong is one clear line."""
    try:
        return NetworkConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            names = list(NetworkConfig.model_fields)
            raise InputError(f"network.{name}: is not a setting; {nearest(name, names)}") from None
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise InputError(f"network.{name} = {first['input']!r:.60}: {message}") from None
