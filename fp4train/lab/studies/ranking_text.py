"""A ranking as a table on one screen."""

from __future__ import annotations

import math

from fp4train.lab.studies.ranking import Ranking
from fp4train.lab.studies.results import VERDICTS
from fp4train.lab.studies.sequential import ALPHA, needed, share
from fp4train.lab.studies.statistics import CONFIDENCE, Estimate, quantile
from fp4train.text import columns, p_value, tabulate


def render(found: Ranking) -> str:
    """One screen: the table, the order, the floor, and what the words mean."""
    parts = [*_title(found), "", *_table(found)]
    parts += [
        f"{entry.name}: {len(entry.diverged)} of {len(entry.forks)} forks diverged, it is not compared; "
        f"the first: {entry.diverged[0]}"
        for entry in found.entries
        if entry.diverged
    ]
    parts += [
        f"{entry.name} stands for {', '.join(entry.stands_for)}, too: every GEMM runs alike"
        for entry in found.entries
        if entry.stands_for
    ]
    parts += [
        f"{spike.entry.name} spikes: its loss is {spike.above:+.4f} from its others at {found.place(spike.fork)}"
        for spike in found.spikes
    ]
    floor = [] if found.floor is None else [f"floor of the noise: FP32 − BF16 = {_show(found.floor)}"]
    return "\n".join([*parts, "", *_bases(found), *_order(found), *floor, *_words(found)])


def _title(found: Ranking) -> list[str]:
    count = f"{found.per_base} fork{'s' * (found.per_base != 1)}"
    lines = []
    for base in found.bases:
        s = base.settings
        rate = f"learning rate {s.lr:.3g} → 0" if s.schedule == "linear" else "the run's own schedule"
        lines.append(f"{base.title}: {count} of {s.steps} steps each, {rate}; trained in {base.trained}")
    return [*lines, f"gap to {found.reference.name}, nats per token"]


def _table(found: Ranking) -> list[str]:
    header = ["", "", "in the recipe", "± tokens", "high precision", "t", "p", "verdict", "group"]
    rows = []
    for place, entry in enumerate(found.ranked, start=1):
        pair = found.against_reference(entry)
        if pair is None:
            mean = math.fsum(entry.losses()) / found.forks
            rows.append([str(place), entry.name, f"loss {mean:.4f}", "", "", "", "", "", found.groups[entry.name]])
            continue
        gap, tokens = found.gap(entry), found.sampling(entry)
        p, verdict = (p_value(pair.p), VERDICTS[pair.verdict]) if found.tested else ("–", "–")
        sampled = "–" if tokens is None else f"± {tokens:.5f}"
        cells = [_show(gap), sampled, _show(found.gap(entry, "high")), _t(gap), p, verdict, found.groups[entry.name]]
        rows.append([str(place), entry.name, *cells])
    rows += [["–", entry.name, "diverged", *[""] * 6] for entry in found.entries if entry.diverged]
    return tabulate([header, *rows], right=(0, 2, 3, 4, 5, 6))


def _bases(found: Ranking) -> list[str]:
    if len(found.bases) == 1:
        return []
    rows = [[e.name, *(f"{at.mean:+.5f}" for at in found.by_base(e))] for e in found.ranked if e != found.reference]
    return ["gap at each checkpoint", *columns(rows, right=range(1, len(found.bases) + 1)), ""]


def _order(found: Ranking) -> list[str]:
    if not found.tested or len(found.ranked) < 2:
        return []
    rows = [
        [f"{p.first} < {p.second}", _show(p.difference), f"t {_t(p.difference)}", p_value(p.p), VERDICTS[p.verdict]]
        for p in found.neighbours()
    ]
    return ["neighbours in the order", *columns(rows, right=(1,)), ""]


def _words(found: Ranking) -> list[str]:
    units, forks, at, look = len(set(found.units)), found.forks, len(found.bases), found.next_look
    what = "base runs" if len({base.run for base in found.bases}) > 1 else "checkpoints"
    lines = ["one checkpoint: all of this holds for it alone; name more runs, or step=A,B, to see others"]
    if at > 1:
        runs = f"{units} base runs: the spread between runs is in ±"
        ages = "one run: the spread between its ages is in ±, that between runs is not"
        lines = [f"{at} checkpoints of {runs if what == 'base runs' else ages}"]
    if others := sum(base.elsewhere for base in found.bases):
        lines.append(f"{others} other rankings have records of their own there: their tests are not counted here")
    if forks == 1:
        return [*lines, "one fork: no interval, and nothing is told apart; forks=6 gives both"]
    errors = f"{quantile(CONFIDENCE, max(units - 1, 1)):.1f} errors of the mean of {units}"
    over = f"over {forks} pairs of forks" if units == 1 else f"over {what} like these, {errors}"
    least, every, pairs = -(-needed(look) // at), len(found.compared_entries), len(found.compared)
    lines += [
        f"±: {CONFIDENCE:.0%} interval of a gap alone, {over}",
        f"± tokens: beside it, for the choice of the {found.bases[0].tokens:,} validation tokens",
    ]
    if not found.tested:
        return [*lines, f"no tests: look {look} at this record needs {least} forks; forks={least} makes them"]
    hidden = f" ({every - len(found.ranked)} not shown)" * (every > len(found.ranked))
    lines += [
        f"p: sign flips of {forks} forks, corrected for {pairs} comparison{'s' * (pairs != 1)} of all {every} "
        f"candidates in the record{hidden}",
        f"   and for looks: look {found.look} at this record has {share(found.look):.1%} of the {ALPHA:.0%}"
        if found.look
        else f"   from earlier looks: look {look} needs {least} forks",
        f"told apart here: p ≤ {ALPHA} on {'this checkpoint' if at == 1 else 'these checkpoints'}; any false one among "
        f"all comparisons and looks at {'it' if at == 1 else 'each of them'}: at most {ALPHA:.0%}",
    ]
    if units > 1:
        lines.append(f"told apart: over {what} like these, too, by t of their means, corrected likewise")
    if any(pair.verdict == "alike" for pair in found.pairs):
        lines.append(f"alike: the difference lies within ±{found.margin:g} on {'it' if at == 1 else 'these'}")
    if open_ := sum(pair.verdict == "open" for pair in found.pairs):
        more = max(2 * found.per_base, least)
        lines.append(f"{open_} of {len(found.pairs)} pairs are not told apart: forks={more} goes on, as the next look")
    return lines


def _show(found: Estimate) -> str:
    """ "+0.00092 ± 0.00041", or without an interval where there is none."""
    return found.show("+.5f", " ± –")


def _t(found: Estimate) -> str:
    return "–" if found.t is None else f"{found.t:.1f}" if abs(found.t) < 1000 else ">999"
