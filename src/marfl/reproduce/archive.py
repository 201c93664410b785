"""Finished runs on the disk, each in a directory named after its settings, sealed: no later change goes unseen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marfl.config import Config
from marfl.errors import InputError
from marfl.reproduce.cases import Calculation, Source, key_of, settings_apart
from marfl.reproduce.kept import KeptRuns, Line, kept_line
from marfl.runs.config_file import config_hash, flattened
from marfl.runs.files import read_json, take_lock, write_json, writing
from marfl.runs.reader import CONFIG, ROWS, SUMMARY, Run, holds_run, open_run, read_config
from marfl.runs.writer import CHECKPOINT, LOCK, RunDir

SEAL = "seal.json"
SEALED = (CONFIG, ROWS, SUMMARY)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Be the only process that reproduces into `out`; a second one is refused with one line."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = take_lock(out / LOCK)
    try:
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Archive:
    """A directory of finished and unfinished runs; beside it perhaps a file of runs that were finished elsewhere."""

    root: Path
    kept: KeptRuns | None = None

    def path(self, source: Source) -> Path:
        """Where a source's result lies: a few words for people, and the key that decides."""
        return self.root / f"{_words(source)}-{key_of(source)}"

    def summary(self, source: Source) -> Mapping[str, Any] | None:
        """The summary of a finished result, or None when there is none (yet); one that was changed is refused."""
        path = self.path(source)
        seal = read_json(path / SEAL)
        if seal is None:
            line = self._line(source)
            found: Mapping[str, Any] | None = line["summary"] if line else None
            return found
        if seal != _seal(path, source):
            raise InputError(
                f"{path}: was changed after it was made; restore it, or remove the directory to have it made again"
            )
        if isinstance(source, Config):
            _check_settings(path, source)
        summary: Mapping[str, Any] | None = read_json(path / SUMMARY)
        return summary

    def _line(self, source: Source) -> Line | None:
        return self.kept.lines.get(key_of(source)) if self.kept else None

    def is_here(self, source: Source) -> bool:
        """Whether the directory itself has the finished result, with every row in full."""
        return (self.path(source) / SEAL).is_file()

    def run(self, config: Config) -> Run:
        """A finished run with its rows."""
        if self.kept is not None and not self.is_here(config):
            return self.kept.run(key_of(config), config.as_dict())
        return open_run(self.path(config))

    def lines(self, sources: Iterable[Source]) -> Iterator[Line]:
        """What is to be kept of these results, as far as they are finished."""
        for source in {key_of(source): source for source in sources}.values():
            if not self.is_here(source):
                line = self._line(source)
                if line is not None:
                    yield line
                continue
            summary, key, name = self.summary(source) or {}, key_of(source), self.path(source).name
            if isinstance(source, Calculation):
                yield kept_line(key, name, source.settings(), summary, ())
            else:
                yield kept_line(key, name, settings_apart(source), summary, self.run(source).rows)

    def begin(self, config: Config, *, anew: bool = False) -> tuple[RunDir, bool]:
        """A directory to run in, and whether the run goes on from a checkpoint that an interruption left.

        `anew` forgets what was left.
        """
        path, tree = self.path(config), config.as_dict()
        left = not anew and holds_run(path) and (path / CHECKPOINT).exists()
        goes_on = left and config_hash(read_config(path)) == config_hash(tree)
        return RunDir.create(path, tree, overwrite=not goes_on, resume=goes_on), goes_on

    def keep(self, calculation: Calculation, result: Mapping[str, Any]) -> None:
        """Write down what a calculation gave."""
        path = self.path(calculation)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        write_json(path / SUMMARY, {**calculation.settings(), **result})
        self.seal(calculation)

    def seal(self, source: Source) -> None:
        """Call a result finished; from now on its files must stay as they are. Its checkpoint is needed no more."""
        path = self.path(source)
        with writing(path):
            (path / CHECKPOINT).unlink(missing_ok=True)
        write_json(path / SEAL, _seal(path, source))


def _seal(path: Path, source: Source) -> dict[str, str]:
    digest = hashlib.sha256()
    for name in SEALED:
        content = (path / name).read_bytes() if (path / name).is_file() else b""
        digest.update(hashlib.sha256(content).digest())
    return {"key": key_of(source), "sha256": digest.hexdigest()}


def _check_settings(path: Path, config: Config) -> None:
    """The run's settings must still mean the same: a default that has changed since makes it another run."""
    now = flattened(config.as_dict())
    changed = [name for name, value in flattened(read_config(path)).items() if now.get(name, value) != value]
    if changed:
        raise InputError(
            f"{path}: was run with another {changed[0]} than this version has; remove the directory to run it again"
        )


def _words(source: Source) -> str:
    if isinstance(source, Calculation):
        return source.function.replace("_", "-")
    return f"{source.task.replace(':', '.')}-{source.technique}-{source.peers}-seed{source.seed}"
