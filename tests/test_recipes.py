"""The recipes of docs/python.md run as they are written, each with a lone peer."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import marfl
import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^### ([^\n]+)\n.*?^```python\n(.*?)^```", PAGE.split("## Recipes")[1], re.MULTILINE | re.DOTALL)
LOOP = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """The processes of one machine: here it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "code"), [("the loop", LOOP), *BLOCKS])
def test_a_recipe_runs_as_it_is_written(name: str, code: str, tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    loader = [(part, (part.sum(1) > 0).long()) for part in inputs.chunk(3)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.detach().clone()
    there = {
        "marfl": type("Marfl", (), {"Peer": partial(marfl.Peer, expected=1)}), "torch": torch, "nn": nn,
        "contextlib": contextlib, "model": model, "loader": loader, "optimizer": optimizer, "address": (),
        "folder": tmp_path,
    }  # fmt: skip
    exec(compile(code.replace("import marfl\n", ""), name, "exec"), there)
    assert there["peer"].iteration == 3
    assert not torch.equal(model[0].weight, before)


def test_every_recipe_that_is_promised_is_there():
    assert [name for name, _ in BLOCKS] == [
        "AdamW", "Schedules", "Checkpoints", "Mixed precision", "Several GPUs in one peer",
    ]  # fmt: skip
