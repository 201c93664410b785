"""Settings for all tests: one torch thread, and no time limits that a busy machine could trip over."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("marfl", deadline=None, print_blob=True)
settings.load_profile("marfl")
