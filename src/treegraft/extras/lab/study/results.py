"""The results of a study: one line a run, added when it ends."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treegraft import DataError
from treegraft.extras.lab.study.plan import RunPlan
from treegraft.extras.lab.text import counted
from treegraft.parts import files, metrics, setting_rows

Line = dict[str, Any]
Key = tuple[str, str, int]

CALLS, REPLAYED = metrics.CALLS
"""Replayed calls, which an environment had to repeat, count as executed, and as shown."""
TOKENS, SECONDS = "rollout/num_sampled_tokens", "time/cpu_s"
DEFAULTS_OF = "defaults_of"
SHOWN = "rollout/num_shown_calls"
"""Executed calls, and grafted ones."""
COSTS = (CALLS, SHOWN, TOKENS, SECONDS)


def read_results(path: Path) -> list[Line]:
    """Returns the runs of a file of results, those of failed runs, which have "error" and no
    curve, included; a last one that a crash cut off is left out.

    Raises:
        DataError: a line that holds no run.
    """
    found: list[Line] = []
    for number, text in _texts(path):
        try:
            line = json.loads(text)
            if DEFAULTS_OF in line:
                continue
            line["world"], line["method"], line["seed"]
            line["error"] if "error" in line else line["curve"][-1]["accuracy"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DataError(
                f"'{path}', line {number}: not a run of a study ({error!r}); expected an object"
                " with world, method, seed and curve. Remove the line, and the run is made again.",
                code="study-line-invalid",
            ) from error
        found.append(line)
    return found


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, text in files.LineFile(path).lines():
            yield number, text
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}', line {number + 1}: not UTF-8 ({error.reason}). Remove the line, and the run"
            " is made again.",
            code="study-line-invalid",
        ) from error


def failed_runs(path: Path, runs: Sequence[RunPlan]) -> dict[Key, Line]:
    """Returns the last failure of those of these runs that have no result."""
    known, keys = known_runs(path, runs)[0], {(*run.key, run.fingerprint) for run in runs}
    return {
        key_of(line): line
        for line in read_results(path)
        if "error" in line
        and (*key_of(line), line.get("fingerprint")) in keys
        and key_of(line) not in known
    }


def known_runs(path: Path, runs: Sequence[RunPlan]) -> tuple[dict[Key, Line], int]:
    """Returns the results of these runs by world, arm and pair, and how many lines the file has of
    finished runs of theirs with other settings.

    A line gets "changed": the settings that had another value in its run, since their default was
    another one then, with both values.
    """
    lines = [line for line in read_results(path) if "error" not in line]
    by_key = {(*key_of(line), line.get("fingerprint")): line for line in lines}
    found = {
        run.key: by_key[*run.key, run.fingerprint]
        for run in runs
        if (*run.key, run.fingerprint) in by_key
    }
    defaults = _defaults(path)
    for run in runs:
        # Lines of earlier versions have none.
        then = defaults.get(str(found.get(run.key, {}).get("defaults")))
        if then is not None:
            idle = {row.name for row in setting_rows(run.config) if row.idle}
            found[run.key]["changed"] = {
                name: [then[name], now]
                for name, now in run.defaults.items()
                if name not in run.told
                and name in then
                and then[name] != now
                # Such as the backend of a tool that the run does not use.
                and name not in idle
            }
    # Lines of other arms belong to studies that share the file.
    keys, wanted = {run.key for run in runs}, {(*run.key, run.fingerprint) for run in runs}
    return found, sum(key_of(line) in keys and full not in wanted for full, line in by_key.items())


def removed_runs(path: Path, keys: Collection[Key]) -> list[Line]:
    """Returns the finished runs of arms that a study has no more, with a mark at their names; the
    last line of each key, since nothing tells which settings the study gave them."""
    found = {key_of(line): line for line in read_results(path) if "error" not in line}
    return [
        {**line, "method": f"{line['method']} (removed since)"}
        for key, line in found.items()
        if key in keys
    ]


def _defaults(path: Path) -> dict[str, Mapping[str, Any]]:
    """The tables of defaults that lines name."""
    found = (json.loads(text) for _, text in _texts(path) if f'"{DEFAULTS_OF}"' in text)
    return {line[DEFAULTS_OF]: line["defaults"] for line in found if DEFAULTS_OF in line}


def changes(lines: Iterable[Line]) -> list[str]:
    """Returns a sentence for each setting whose default has changed since some runs."""
    counts = Counter(
        (name, json.dumps(then), json.dumps(now))
        for line in lines
        for name, (then, now) in line.get("changed", {}).items()
    )
    return [
        f"{name} was {then} in {counted(count, 'run')} already there, and is {now} now by default"
        for (name, then, now), count in sorted(counts.items())
    ]


def mixed_pairs(lines: Iterable[Line]) -> list[int]:
    """Returns the pairs of these lines, of one world, whose runs did not all begin with the same
    weights: a warm-up of equal seeds ends as another agent on another kind of processor. Runs
    without one are left out.

    Lines of earlier versions have no checksum of weights; those are told by their processor.
    """
    weights, places = defaultdict[Any, set[str]](set), defaultdict[Any, set[str]](set)
    for line in lines:
        # The recipe's model is the same on every machine.
        if line.get("warmup") is None and line.get("warmup_seed") is None:
            continue
        # Arms with a warm-up of their own begin with other weights on purpose.
        begun = (line["seed"], (line.get("warmup") or {}).get("fingerprint"))
        places[begun].add(str((line.get("machine") or {}).get("cpu", "")))
        weights[begun].add(line.get("weights") or "")
    return sorted(
        {
            begun[0]
            for begun, own in weights.items()
            if len(own - {""}) > 1 or ("" in own and len(places[begun]) > 1)
        }
    )


def key_of(line: Line) -> Key:
    """Returns the world, arm and pair of a line."""
    return line["world"], line["method"], line["seed"]


def add_results(path: Path, runs: Sequence[RunPlan], found: Line) -> None:
    """Adds a line for each of these runs, which are one and the same in different worlds or under
    different names.

    Args:
        found: the results, with date and machine.
    """
    tables = _defaults(path)
    for run in runs:
        text = json.dumps(run.defaults, sort_keys=True)
        defaults = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        # Once a file; a run that stands for an equal one keeps that one's.
        if defaults not in tables and "defaults" not in found:
            files.LineFile(path).append(
                json.dumps({DEFAULTS_OF: defaults, "defaults": run.defaults})
            )
            tables[defaults] = run.defaults
        line = {
            "world": run.world,
            "method": run.arm,
            "seed": run.pair,
            "run_seed": run.config.run.seed,
            "warmup_seed": None if run.warmup is None else run.warmup.config.run.seed,
            "fingerprint": run.fingerprint,
            "defaults": defaults,
            **found,
            **({"tuning": dict(run.tuning)} if any(run.tuning.values()) else {}),
            "settings": dict(run.shown),
        }
        files.LineFile(path).append(json.dumps(line, default=str))


def repair(path: Path, runs: Sequence[RunPlan]) -> None:
    """Removes a last line that a crash cut off, and adds the lines of runs that are equal to one
    that has its line, also under the name of another study's arm."""
    files.LineFile(path).drop_cut()
    known = known_runs(path, runs)[0]
    finished = [line for line in read_results(path) if "error" not in line]
    by_fingerprint = {line.get("fingerprint"): line for line in finished}
    for run in runs:
        if run.key not in known and run.fingerprint in by_fingerprint:
            same = _without_own(by_fingerprint[run.fingerprint])
            add_results(path, [run], {"defaults": None} | same)


def _without_own(line: Line) -> Line:
    own = (
        "world",
        "method",
        "seed",
        "run_seed",
        "warmup_seed",
        "fingerprint",
        "tuning",
        "settings",
        "changed",
    )
    return {name: value for name, value in line.items() if name not in own}


def curve(
    lines: Sequence[Mapping[str, float]], warmup: Sequence[Mapping[str, float]] = ()
) -> list[Line]:
    """Returns the accuracy at each evaluation, sampled where that was measured, with the costs so
    far.

    Args:
        lines: of metrics.jsonl; the costs in it are those of each update.
        warmup: of warmup.jsonl, the evaluations during a run's own imitation; they get updates
            below 0, its last step 0.

    Raises:
        DataError: no evaluation.
    """
    points = []
    steps = [line.get("warmup/num_steps", 0.0) for line in warmup]
    for line, step in zip(warmup, steps, strict=True):
        spent = dict.fromkeys(COSTS, 0.0) | {SECONDS: line.get("time/warmup_cpu_s", 0.0)}
        points.append({"update": int(step - steps[-1]), **_measured(line), **spent})
    spent = dict.fromkeys(COSTS, 0.0)
    for line in lines:
        spent = {cost: total + _spent(line, cost) for cost, total in spent.items()}
        if measured := _measured(line):
            if points and points[-1]["update"] == line["update"]:
                points.pop()
            points.append({"update": line["update"], **measured, **spent})
    if not points:
        raise DataError(
            "the run has no evaluation; expected eval.at_end = true, or warmup.eval_every where it"
            " imitates alone.",
            code="no-evaluation",
        )
    return points


BY_UPDATE = (CALLS, TOKENS, "learn/entropy", "time/rollout_s", "time/learn_s")
"""Metrics of each update that a line holds beside its curve."""


def by_update(lines: Sequence[Mapping[str, float]], more: Mapping[int, Line]) -> Line:
    """Returns metrics of updates as columns, "update" first, None where one was not recorded.

    Args:
        lines: of metrics.jsonl; that of update 0 is left out.
        more: further metrics by update.
    """
    own = [
        {**line, **more.get(int(line["update"]), {})}
        | ({CALLS: _spent(line, CALLS)} if CALLS in line else {})
        for line in lines
        if line["update"] > 0
    ]
    keys = [key for key in (*BY_UPDATE, *_keys(more)) if any(key in one for one in own)]
    columns: Line = {"update": [int(one["update"]) for one in own]}
    for key in keys:
        # Six digits are more than a figure shows.
        columns[key] = [float(f"{one[key]:.6g}") if key in one else None for one in own]
    return columns


def _keys(more: Mapping[int, Line]) -> Sequence[str]:
    return list(dict.fromkeys(key for one in more.values() for key in one))


def _measured(line: Mapping[str, float]) -> dict[str, float]:
    """The accuracies of a line, the one that curves show first; none without an evaluation."""
    kinds = ("eval/accuracy_sampled", "eval/accuracy")
    found = [line[kind] for kind in kinds if kind in line]
    # The second is the greedy one, where both were measured.
    also = {kind: line[kind] for kind in kinds[1:] if len(found) > 1}
    also |= {key: value for key, value in line.items() if key.startswith("eval/pass_")}
    return {"accuracy": found[0], **also} if found else {}


def _spent(line: Mapping[str, float], cost: str) -> float:
    if cost == SECONDS:
        # Imitation before the first update stands in the line of update 0.
        return line.get(SECONDS, 0.0) + line.get("time/warmup_cpu_s", 0.0)
    again = line.get(REPLAYED, 0.0) if cost in (CALLS, SHOWN) else 0.0
    if cost == SHOWN and cost not in line:
        return line.get(CALLS, 0.0) + line.get("graft/num_grafts", 0.0) + again
    return line.get(cost, 0.0) + again
