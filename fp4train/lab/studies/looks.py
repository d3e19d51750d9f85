"""The looks that were taken at the records of checkpoints, so that asking in pieces buys no significance.

A record is one checkpoint's, and begins with its reference. A look is written into the record of every checkpoint of
its table:

    "look/2": {"number": 2, "of": [checkpoints], "table": digest, "candidates": [keys],
               "found": {"key key": [p, beyond]}}

Its number is one more than the largest in any of these records, so that the numbers in a record only rise and the
shares of its looks sum to at most 1. A table that was looked at before is the same look, whatever is shown of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp4train.lab.studies.identity import digest
from fp4train.lab.studies.record import StudyRecord
from fp4train.lab.studies.sequential import Found, Pair, needed

_LOOK, _REFERENCE = "look/", "reference"


class Looks:
    """The looks at a set of checkpoints.

    Args:
        records: by the digest of each checkpoint.
        reference: the key of the reference in each, which is recorded in those that have none yet: what comes first is
            chosen before there are forks.
    """

    def __init__(self, records: Mapping[str, StudyRecord], reference: Sequence[str]) -> None:
        self.records, self.of = records, sorted(records)
        for record, key in zip(records.values(), reference, strict=True):
            if _REFERENCE not in record:
                record.add(_REFERENCE, {"key": key})
        first = {str(record[_REFERENCE]["key"]) for record in records.values()}
        self.reference = first.pop() if len(first) == 1 else None
        self._every = [
            values for record in records.values() for key, values in record.known.items() if key.startswith(_LOOK)
        ]

    @property
    def next(self) -> int:
        """The number of the next look."""
        return 1 + max((each["number"] for each in self._every), default=0)

    @property
    def seen(self) -> set[str]:
        """The keys of all candidates of these looks."""
        return {key for each in self._every for key in each["candidates"]}

    @property
    def earlier(self) -> dict[frozenset[str], Found]:
        """By the keys of two candidates the least (p, beyond) of all looks at exactly these checkpoints."""
        found: dict[frozenset[str], Found] = {}
        for look in (each for each in self._every if each["of"] == self.of):
            for words, (p, beyond) in look["found"].items():
                pair = frozenset(words.split())
                before = found.get(pair, (1.0, 1.0))
                found[pair] = min(before[0], p), min(before[1], beyond)
        return found

    def number(self, table: Any, forks: int) -> int | None:
        """That of the look at a table, which is any description of what is tested; None where its forks are too few to
        tell anything apart, so that no look is taken."""
        known = self._known(table)
        if known is not None:
            return known
        return self.next if forks >= needed(self.next) else None

    def take(self, table: Any, candidates: Sequence[str], pairs: Sequence[Pair]) -> None:
        """Record the look at a table, if it is a new one. The pairs are named by keys."""
        if self._known(table) is not None:
            return
        found = {f"{pair.first} {pair.second}": [pair.p, pair.beyond] for pair in pairs if pair.p < 1}
        number = self.next
        look = {"number": number, "of": self.of, "table": digest(table), "candidates": list(candidates), "found": found}
        for record in self.records.values():
            record.add(f"{_LOOK}{number}", look)

    def _known(self, table: Any) -> int | None:
        wanted = self.of, digest(table)
        return next((int(each["number"]) for each in self._every if (each["of"], each["table"]) == wanted), None)
