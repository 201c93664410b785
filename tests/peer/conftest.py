"""What the tests of real peers share."""

from stages.disk import disk  # noqa: F401 - a fixture
