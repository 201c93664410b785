"""The real peer: the library's `Peer`, and the daemon behind `marfl peer`.

    network     how patient a peer is and where it listens: the `[network]` table of a config file
    link        the way into a swarm: keep trying, remember who was met, say who is here
    closed      the door of a closed run: only peers with a token of its authority
    voter       a participant that remembers its votes on the disk before it casts them
    trainer     local updates of a `Task`, bit for bit those of the simulator
    store       the state directory
    status      a JSON page on loopback
    daemon      `marfl peer`
    library     `Peer` and `AsyncPeer`
"""

from marfl.peer.library import Aggregated, AsyncPeer, Peer

__all__ = ["Aggregated", "AsyncPeer", "Peer"]
