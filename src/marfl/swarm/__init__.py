"""`marfl swarm`: real peers on one machine.

    faults       whom to kill, stop or cut off, and when
    processes    groups of processes, their daemons and sockets
    namespaces   networks of our own, for partitions and slow links
    peers        one peer seen from outside
    rows         what the peers wrote, as one run
    run          all of it together
"""

from marfl.swarm.faults import Faults, Kill, Moment, NetworkPartition, Stop, parse_kills, parse_partition, parse_stops
from marfl.swarm.run import Orders, Swarm

__all__ = [
    "Faults",
    "Kill",
    "Moment",
    "NetworkPartition",
    "Orders",
    "Stop",
    "Swarm",
    "parse_kills",
    "parse_partition",
    "parse_stops",
]
