"""Settings for all tests: one torch thread, a Ctrl-C that works, no time limits that a busy machine could trip over."""

import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("marfl", deadline=None, print_blob=True)
settings.load_profile("marfl")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
