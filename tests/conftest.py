"""Settings for all tests: one torch thread, a Ctrl-C that works, no time limits that a busy machine could trip over."""

import gc
import signal
import sys

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("marfl", deadline=None, print_blob=True)
settings.load_profile("marfl")
ONE_PROCESS = {  # their tests share a dear fixture or import: a swarm of real peers, many runs, transformers
    "test_access_libp2p.py", "test_libp2p.py", "test_libp2p_hostile.py", "test_news20.py", "test_pieces.py",
    "test_reproduce.py", "test_reproduce_quick.py",
}  # fmt: skip
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Whoever forks processes for tests ends with them."""
    if warm := sys.modules.get("stages.warm"):
        warm.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each test goes to the process that is free, but those that share a dear fixture go to one.

    xdist's own groups do nothing under pytest 9.2, which no longer lets them change the id of a test.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return file if file.rpartition("/")[2] in ONE_PROCESS else nodeid

    return Scheduling(config, log)
