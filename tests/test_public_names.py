"""The public names: sorted, all there, and free until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import marfl
import marfl.plan


@pytest.mark.parametrize("module", [marfl, marfl.plan])
def test_public_names_are_sorted_unique_and_resolve(module):
    assert list(module.__all__) == sorted(set(module.__all__))
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        marfl.nonsense  # noqa: B018


def test_importing_the_package_and_the_command_line_does_not_wait_for_torch():
    script = "import sys, marfl, marfl.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
