"""For tests of your own: a swarm in virtual time, everything that can go wrong with it, and the promises it keeps.

    VirtualNetwork, Link, run_virtual    a network in memory whose clock jumps
    Fault, Strike, Injector, Hooks       what befalls whom, and when
    World                                a swarm with faults, from one seed; `run` checks every promise
    soak                                 many worlds: ``python -m marfl.testing.soak --seeds 2000``
    recorded                             small runs that must come out as recorded: ``python -m marfl.testing.recorded``
"""

from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.testing.faults import Fault, Strike
from marfl.testing.injector import Hooks, Injector
from marfl.testing.world import Report, World

__all__ = ["Fault", "Hooks", "Injector", "Link", "Report", "Strike", "VirtualNetwork", "World", "run_virtual"]
