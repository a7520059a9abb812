"""Judges a record's claim from its run logs: numbers, tests, a verdict.

    python records/stats.py logs/*.txt                    is the mean final loss below the target?
    python records/stats.py new/*.txt --vs old/*.txt      and is the new version faster than the old one?
    python records/stats.py race/ --side a                the same, from the logs of one race: side a against side b
    python records/stats.py --plan --sd 0.0013 --margin 0.002     how many runs such a claim needs
    --markdown  the record's README section and leaderboard row     --plot out.png     --json (a plan takes only this)

Exit status: 0 the claim holds, 1 it does not, 2 it cannot be judged (too few runs, mixed sources, missing
or diverged runs, ...).

The claim is that the mean final loss is below the target: one-sided one-sample t-test, p < alpha. With a second set it
is also that the mean train_time is less than the second set's: one-sided Welch t-test, p < alpha. Both must hold, so
a wrong claim passes with probability alpha at most. A paired test is shown for interleaved runs, and decides nothing.
These tests are right for a number of runs that was fixed before the first one. Looking after every run and stopping
at p < alpha passes a wrong claim about five times as often. Our logs hold the declared number, and it is enforced.

Intervals have confidence 1 - 2 alpha: their upper end is below the target exactly when the one-sided test says so.
Needs logs.py beside it, numpy and scipy; matplotlib for --plot.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy.stats

import logs

DEFAULT_TARGET = 3.28  # FineWeb, the public speedrun's main track
LATE = 0.1  # a clock may be reset in this first part of a run, after its warm-up
OUTLIER, OUTLIER_RUNS = 5, 10  # robust standard deviations from the median; of fewer runs they tell nothing
MOST_RUNS = 1_000_000  # in a plan
MOST_SHOWN = 20  # runs of a side that cannot be judged
# Config values that do not change what is trained
INCIDENTAL = {"seed", "run_id", "log_dir", "save_model", "sample_tokens", "train_loss_every", "timeout_s"}


class CannotJudge(Exception):
    """The input does not allow a verdict; the message says what was seen and what to do.

    sides: the Sides that were read by then."""
    sides = ()


# Statistics: arrays of runs [..., n] in, tests over the last axis

def one_sample_t_less(losses, target):
    """One-sided one-sample t-test of mean < target."""
    return scipy.stats.ttest_1samp(losses, target, axis=-1, alternative="less")


def welch_t_less(times, others):
    """One-sided Welch t-test of mean(times) < mean(others)."""
    return scipy.stats.ttest_ind(times, others, axis=-1, equal_var=False, alternative="less")


def paired_t_less(times, others):
    """One-sided paired t-test of mean(times - others) < 0."""
    return scipy.stats.ttest_rel(times, others, axis=-1, alternative="less")


def power(n, sd, margin, alpha, sets=1):
    """Probability that a one-sided t-test finds a true margin, by the noncentral t distribution.

    sets=1: n runs against a fixed target. sets=2: n runs a side, both with this sd (Welch's test is close to it)."""
    df = sets * (n - 1)
    noncentrality = margin / (sd * math.sqrt(sets / n))
    return float(scipy.stats.nct.sf(scipy.stats.t.isf(alpha, df), df, noncentrality))


def runs_needed(sd, margin, alpha, wanted, sets=1):
    """The least n (a side) with the wanted power. Raises CannotJudge if it is beyond MOST_RUNS."""
    few, enough = 1, 2
    while not power(enough, sd, margin, alpha, sets) >= wanted:
        few, enough = enough, 2 * enough
        if enough > MOST_RUNS:
            raise CannotJudge(f"a margin of {margin:g} at sd {sd:g} needs more than {MOST_RUNS:,} runs; seek "
                              "a larger one")
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if power(middle, sd, margin, alpha, sets) >= wanted else (middle, enough)
    return enough


def summary(values):
    """n, mean, sample standard deviation (n - 1; None for one value) and range."""
    values = np.asarray(values, dtype=float)
    sd = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"n": len(values), "mean": float(values.mean()), "sd": sd,
            "min": float(values.min()), "max": float(values.max())}


def _tested(result, kind):
    return {"test": kind, "t": float(result.statistic), "df": float(result.df), "p": float(result.pvalue)}


def _interval(two_sided, alpha):
    return [float(end) for end in two_sided.confidence_interval(1 - 2 * alpha)]


def judge_loss(losses, target, alpha):
    """The loss half of a verdict as a dict. Raises CannotJudge where a t-test is not defined."""
    found = summary(losses)
    if found["n"] < 2:
        raise CannotJudge(f"a test needs at least 2 runs, and there is {found['n']}; add runs (--plan tells how many)")
    if np.ptp(losses) == 0:
        raise CannotJudge(f"all {found['n']} losses are {losses[0]}: with sd 0 a t-test is not defined; use distinct "
                          "seeds, and log more decimals")
    two_sided = scipy.stats.ttest_1samp(losses, target)
    return {**found, "target": target, "interval": _interval(two_sided, alpha),
            **_tested(one_sample_t_less(losses, target), "one-sided one-sample t-test, mean < target")}


def compare_times(times, others, alpha, pairs=None):
    """Seconds against others', as a dict; pairs (n, 2), of runs that were interleaved, add a paired test."""
    a, b = summary(times), summary(others)
    for found in (a, b):
        if found["n"] < 2:
            raise CannotJudge(f"comparing times needs at least 2 runs a side, and one has {found['n']}; add runs")
        if found["mean"] <= 0:
            raise CannotJudge(f"the mean train_time of a side is {found['mean']} s; pass logs whose clock ran")
    if a["sd"] == 0 and b["sd"] == 0:
        raise CannotJudge("the times of each side are all equal: with sd 0 a t-test is not defined; log milliseconds")
    two_sided = scipy.stats.ttest_ind(times, others, equal_var=False)
    ratio = b["mean"] / a["mean"]
    error = ratio * math.hypot(a["sd"] / a["mean"] / math.sqrt(a["n"]), b["sd"] / b["mean"] / math.sqrt(b["n"]))
    compared = {"other": b, "difference": a["mean"] - b["mean"], "interval": _interval(two_sided, alpha),
                "ratio": ratio, "ratio_standard_error": error,  # of a quotient of means, by the delta method
                **_tested(welch_t_less(times, others), "one-sided Welch t-test, time < other time"),
                "p_two_sided": float(two_sided.pvalue), "paired": None}
    if pairs is not None and np.ptp(np.subtract(*np.transpose(pairs))) > 0:
        paired = paired_t_less(*np.transpose(pairs))
        compared["paired"] = {"pairs": len(pairs), **_tested(paired, "one-sided paired t-test")}
    return compared


# Which runs are judged

@dataclass
class Side:
    """One set of runs: those judged, what was left out and why, and what its reader should know."""
    name: str
    source_flag: str
    runs: list
    left_out: list = field(default_factory=list)  # (path, reason)
    warnings: list = field(default_factory=list)

    @property
    def losses(self):
        return [run.final_loss for run in self.runs]

    @property
    def seconds(self):
        return [run.train_time_ms / 1000 for run in self.runs]

    @property
    def untimed(self):
        """Runs whose last validation line states no train_time that a run could have taken."""
        return [run for run in self.runs if run.train_time_ms is None or run.train_time_ms <= 0]

    @property
    def timed(self):
        return not self.untimed

    @property
    def set_back(self):
        """Runs whose clock fell back otherwise than once after a warm-up: their last time is not of the whole run."""
        return [run for run in self.runs
                if len(run.clock_falls) > 1 or any(step > LATE * run.last_step for step in run.clock_falls)]


class Race(NamedTuple):
    """The race field of a log's start line."""
    race_id: str
    side: str
    run: str
    declared_n: object


def race_of(run):
    """The Race of a run or of a rejected one, or None."""
    race = (run.start or {}).get("race")
    if not isinstance(race, dict) or "race_id" not in race:
        return None
    return Race(str(race["race_id"]), str(race.get("side") or ""), str(race.get("run")), race.get("declared_n"))


def config_of(run):
    """The config values in a log's start line that change what is trained."""
    config = (run.start or {}).get("config")
    return {key: value for key, value in (config.items() if isinstance(config, dict) else ())
            if key not in INCIDENTAL and not key.startswith("race_")}


def names(items):
    """Paths of runs for a message, shortened where there are many."""
    paths = [logs.printable(os.path.basename(item.path)) for item in items]
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def gather(name, source_flag, found, source, gpus, race_side=None):
    """A Side from what logs.read found, narrowed to a source, a number of GPUs, a side of a race."""
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    if unreadable:
        raise CannotJudge("; ".join(f"{logs.printable(item.path)}: {item.reason}" for item in unreadable))
    runs = [run for run in found.runs if race_side is None or (race_of(run) and race_of(run).side == race_side)]
    side = Side(name, source_flag, runs)
    side.left_out = [(item.path, item.reason) for item in found.rejected]
    side.left_out += [(item.path, f"{item.reason}: {logs.printable(item.original_path)}") for item in found.duplicates]

    def keep(which, remark):
        side.left_out += [(run.path, remark) for run in side.runs if not which(run)]
        side.runs = [run for run in side.runs if which(run)]

    if source:
        matching = {run.source_sha256 for run in side.runs if (run.source_sha256 or "").startswith(source.lower())}
        if len(matching) > 1:
            raise CannotJudge(f"{len(matching)} sources begin with {source}: {', '.join(sorted(matching))}; "
                              "give more digits")
        keep(lambda run: run.source_sha256 in matching, f"of another source than {source}")
    if gpus:
        keep(lambda run: run.gpus == gpus, f"not a run on {gpus} GPUs")
    if not side.runs:
        reasons = "; ".join(f"{logs.printable(path)}: {reason}" for path, reason in side.left_out[:3])
        raise CannotJudge(f"{name} holds no run that can be used ({reasons or 'nothing was found'}); "
                          "`python records/logs.py PATH...` tells more")
    incomplete = [item for item in found.rejected if item.kind == logs.INCOMPLETE]
    if incomplete:
        side.warnings.append(f"not counted, although started: {names(incomplete)}; say why in the record, or the claim "
                             "rests on a selection")
    return side


def check_one_experiment(side, mixed):
    """Raises CannotJudge if the runs are of several experiments; only warns if mixed."""
    def refuse(message):
        if not mixed:
            raise CannotJudge(message + "or say --mixed to judge them as one set")
        side.warnings.append("judged as one set although " + message.split(";")[0])

    def grouped(key):
        groups = defaultdict(list)
        for run in side.runs:
            groups[key(run)].append(run)
        return groups

    sources = grouped(lambda run: run.source_sha256)
    if len(sources) > 1:
        listed = ", ".join(f"{(source or 'none')[:8]} ({len(runs)}: {names(runs)})" for source, runs in sources.items())
        choice = next(source for source in sources if source)[:8]
        refuse(f"{side.name} holds runs of {len(sources)} sources: {listed}; choose one, for instance with "
               f"{side.source_flag} {choice}, ")
    elif None in sources:
        side.warnings.append(f"the logs of {side.name} hold no source: nothing shows that they are of one experiment")

    configs = list(map(config_of, side.runs))
    for key in sorted({key for config in configs for key in config}):
        values = Counter(json.dumps(config.get(key)) for config in configs)
        if len(values) > 1:
            listed = ", ".join(f"{value} ({count})" for value, count in values.items())
            refuse(f"{side.name} holds runs whose {key} differs: {listed}; pass the logs of one, ")

    steps = grouped(lambda run: run.last_step if run.stated_steps is None else run.stated_steps)
    if len(steps) > 1 and len(sources) == 1:
        listed = ", ".join(f"{step} ({names(runs)})" for step, runs in steps.items())
        refuse(f"{side.name} holds runs of different lengths: {listed} steps; pass the logs of one, ")

    gpus = grouped(lambda run: run.gpus)
    if len(gpus.keys() - {None}) > 1:
        listed = ", ".join(f"{count or 'unknown'} ({len(runs)}: {names(runs)})" for count, runs in gpus.items())
        choice = max(gpus.keys() - {None}, key=lambda count: len(gpus[count]))
        refuse(f"{side.name} holds runs on different numbers of GPUs: {listed}; choose one, for instance with "
               f"--gpus {choice}, ")

    races = grouped(lambda run: race_of(run) and race_of(run).race_id)
    if len(races) > 1:
        listed = ", ".join(f"{race or 'none'} ({len(runs)})" for race, runs in races.items())
        refuse(f"{side.name} holds runs of different races: {listed}; pass the logs of one, ")
    if None in races:
        side.warnings.append(f"{side.name} declares no number of runs: the verdict stands only if it was fixed before "
                             "the first run, and if every run that was started is here")

    def seeded(run):
        """What makes two runs one experiment done twice; None where the log states no seed."""
        seed = (run.start or {}).get("seed")
        return None if seed is None else json.dumps([seed, run.source_sha256, config_of(run)], sort_keys=True)

    for experiment, runs in grouped(seeded).items():
        if experiment and len(runs) > 1:
            raise CannotJudge(f"{len(runs)} runs of {side.name} share the seed {json.dumps(runs[0].start['seed'])} "
                              f"({names(runs)}): they are not independent, and p would be too small; race with "
                              "distinct seeds")


def check_all_there(side, rejected):
    """Raises CannotJudge unless each race in the set has exactly the runs that were declared before it."""
    races = defaultdict(list)
    for run in side.runs:
        if race_of(run):
            races[race_of(run)[:2]].append(run)
    for (race_id, race_side), runs in races.items():
        where = f"race {race_id}" + (f", side {race_side}" if race_side else "")
        declared = list({json.dumps(race_of(run).declared_n): race_of(run).declared_n for run in runs}.values())
        if len(declared) > 1:
            raise CannotJudge(f"{where}: its logs declare different numbers of runs ({', '.join(map(str, declared))}); "
                              "race anew")
        twice = [number for number, count in Counter(race_of(run).run for run in runs).items() if count > 1]
        if twice:
            raise CannotJudge(f"{where}: run {', '.join(twice)} is there more than once; pass each run once")
        if len(runs) == declared[0]:
            continue
        failed = [item for item in rejected if race_of(item) and race_of(item)[:2] == (race_id, race_side)]
        why = "".join(f"; run {race_of(item).run} ({logs.printable(item.path)}): {item.reason}" for item in failed)
        raise CannotJudge(f"{where}: {declared[0]} runs were declared and {len(runs)} can be used{why}; pass the logs "
                          "of all, or race anew")


def check_none_diverged(side, rejected):
    """Raises CannotJudge if a run of the set ended in a loss that is no number: it speaks against the claim, and has no
    place in a mean."""
    sources, races = {run.source_sha256 for run in side.runs}, {race_of(run) and race_of(run)[:2] for run in side.runs}
    diverged = [item for item in rejected if item.kind == logs.NOT_FINITE and item.source_sha256 in sources
                and (race_of(item) and race_of(item)[:2]) in races]
    if diverged:
        raise CannotJudge(f"{names(diverged)} of {side.name} diverged ({diverged[0].reason}): a run that was started "
                          "and speaks against the claim; mend what made it diverge and race anew")


def check_not_shared(a, b):
    """Raises CannotJudge if a run is in both sets."""
    _, copies = logs.without_copies(a.runs + b.runs)
    paths = {os.path.realpath(run.path) for run in a.runs}
    shared = [run.path for run in b.runs if os.path.realpath(run.path) in paths] or [copy.path for copy in copies]
    if shared:
        raise CannotJudge(f"{logs.printable(shared[0])} is in both sets; a run belongs to one")


def look_closer(side):
    """Adds what the logs themselves remark, and what is odd about their times, to the warnings."""
    for note, count in Counter(note for run in side.runs for note in run.notes).items():
        side.warnings.append(f"{note} ({count} of {len(side.runs)} runs of {side.name})")
    if not side.timed:
        without = [run for run in side.untimed if run.train_time_ms is not None]
        if without:
            side.warnings.append(f"train_time is not above zero on the last line of {names(without)}: the times are "
                                 "not judged")
        return
    if side.set_back:
        side.warnings.append(f"the clock was set back during training ({names(side.set_back)}): such a time is not "
                             "that of a whole run")
    spread = scipy.stats.median_abs_deviation(side.seconds, scale="normal")
    middle = np.median(side.seconds)
    for run, seconds in zip(side.runs, side.seconds):
        if len(side.runs) >= OUTLIER_RUNS and abs(seconds - middle) > OUTLIER * spread > 0:
            side.warnings.append(f"{names([run])} took {seconds:.3f} s where the median is {middle:.3f} s: an outlier, "
                                 "and counted; see whether the machine was idle")


def choose_target(runs, given):
    """The target given, else the one that all logs state, else the default."""
    if given is not None:
        return given
    targets = [(run.start or {}).get("target_val_loss") for run in runs]
    stated = list({json.dumps(target): target for target in targets}.values())
    if stated == [None]:
        return DEFAULT_TARGET
    if len(stated) > 1 or type(stated[0]) not in (int, float) or not math.isfinite(stated[0]):
        raise CannotJudge(f"the logs state the targets {', '.join(map(str, stated))}; choose with --target")
    return float(stated[0])


def find_pairs(a, b):
    """Seconds (n, 2) of the runs of one race that have the same number on both sides; None unless all have."""
    def numbered(side):
        raced = [(race_of(run), seconds) for run, seconds in zip(side.runs, side.seconds)]
        return {(race.race_id, race.run): seconds for race, seconds in raced if race}
    ours, theirs = numbered(a), numbered(b)
    if len(ours) < 2 or ours.keys() != theirs.keys() or len(ours) != len(a.runs):
        return None
    return [(ours[key], theirs[key]) for key in ours]


def choose_sides(options):
    """-> [(Side, its rejected logs)], one or two of them."""
    found = logs.read(options.paths)
    raced = sorted({race_of(run).side for run in found.runs if race_of(run)} - {""})
    if options.side:
        if options.side not in raced or len(raced) != 2:
            raise CannotJudge(f"--side {options.side} wants the logs of a race with that side and one other; these "
                              f"have {', '.join(raced) or 'no sides'}; pass all logs of one race")
        other = next(side for side in raced if side != options.side)
        return [(gather(f"side {side}", flag, found, source, options.gpus, side), found.rejected)
                for side, flag, source in ((options.side, "--source", options.source),
                                           (other, "--vs-source", options.vs_source))]
    if len(raced) > 1:
        raise CannotJudge(f"these are logs of the sides {', '.join(raced)} of a race; say whose claim it is, for "
                          f"instance --side {raced[0]}")
    sides = [(gather("the set", "--source", found, options.source, options.gpus), found.rejected)]
    if options.vs:
        found = logs.read(options.vs)
        sides.append((gather("the --vs set", "--vs-source", found, options.vs_source, options.gpus), found.rejected))
    return sides


def judge(options):
    """Options of the command -> the report, a dict for --json; the Sides are under "sides". Raises CannotJudge."""
    sides = choose_sides(options)
    try:
        return judge_sides(sides, options)
    except CannotJudge as reason:
        reason.sides = [side for side, _ in sides]
        raise


def judge_sides(sides, options):
    """judge, of what choose_sides gave."""
    for side, rejected in sides:
        check_one_experiment(side, options.mixed)
        check_all_there(side, rejected)
        check_none_diverged(side, rejected)
        look_closer(side)
    sides = [side for side, _ in sides]
    a = sides[0]
    loss = judge_loss(a.losses, choose_target(a.runs, options.target), options.alpha)
    comparison = compare(*sides, options) if len(sides) == 2 else None
    below = loss["p"] < options.alpha
    faster = comparison is None or comparison["p"] < options.alpha
    return {"verdict": "the claim holds" if below and faster else "the claim does not hold",
            "reason": _reason(loss, comparison, options.alpha), "alpha": options.alpha,
            "loss": {**loss, "significant": below}, "time": summary(a.seconds) if a.timed else None,
            "comparison": comparison and {**comparison, "significant": faster},
            "warnings": list(dict.fromkeys(warning for side in sides for warning in side.warnings)),
            "left_out": list_runs(sides)["left_out"], "sides": sides}


def compare(a, b, options):
    """compare_times of two Sides, with the other's loss. Raises CannotJudge where their times cannot be compared."""
    check_not_shared(a, b)
    untimed = a.untimed + b.untimed
    if untimed:
        raise CannotJudge(f"no train_time above zero on the last validation line of {names(untimed)}; without a second "
                          "set the loss alone can be judged")
    set_back = a.set_back + b.set_back
    if set_back:
        raise CannotJudge(f"the clock was set back during training ({names(set_back)}): such times do not compare; "
                          "without a second set the loss alone can be judged")
    counts = [sorted({run.gpus for run in side.runs}, key=str) for side in (a, b)]
    if counts[0] != counts[1] and not options.mixed:
        shown = [" and ".join(str(count or "unknown") for count in found) for found in counts]
        raise CannotJudge(f"the sets ran on different numbers of GPUs ({shown[0]} against {shown[1]}); compare runs on "
                          "the same machine, or say --mixed")
    compared = compare_times(a.seconds, b.seconds, options.alpha, find_pairs(a, b))
    return {**compared, "other_loss": summary(b.losses)}


def _reason(loss, comparison, alpha):
    below = "<" if loss["p"] < alpha else "not significantly <"
    parts = [f"mean loss {below} {loss['target']:g} (p = {loss['p']:.4g})"]
    if comparison:
        faster = "faster" if comparison["p"] < alpha else "not significantly faster"
        parts.append(f"{faster} (p = {comparison['p']:.4g})")
    return f"{', '.join(parts)}, at alpha {alpha:g}"


# What is shown

def show_loss(value, runs, more=1):
    return f"{value:.{max(run.loss_decimals for run in runs) + more}f}"


def show_report(report):
    """The report as lines of text."""
    a, *others = report["sides"]
    loss, time, compared = report["loss"], report["time"], report["comparison"]
    confidence = f"{100 * (1 - 2 * report['alpha']):g} % CI"
    insignificant = f"  Not significant: p is not below {report['alpha']:g}."
    low, high = (show_loss(end, a.runs) for end in loss["interval"])
    lines = [
        f"Loss ({loss['n']} runs, target {loss['target']:g})",
        f"  mean ± σ:     {show_mean_loss(loss, a.runs)}    {confidence} {low} … {high}",
        f"  range:        {show_loss(loss['min'], a.runs, 0)} … {show_loss(loss['max'], a.runs, 0)}",
        f"  mean < {loss['target']:g}:  p = {loss['p']:.4g}    {show_test(loss)}",
        "" if loss["significant"] else insignificant, ""]
    if time:
        lines += [f"Time ({time['n']} runs, train_time of the last validation line)",
                  f"  mean ± σ:     {show_time(time)}",
                  f"  range:        {time['min']:.3f} … {time['max']:.3f} s", ""]
    if compared:
        other, (low, high) = compared["other"], compared["interval"]
        lines += [
            f"Against {others[0].name} ({other['n']} runs)",
            f"  their time:   {show_time(other)}    range {other['min']:.3f} … {other['max']:.3f} s",
            f"  their loss:   {show_mean_loss(compared['other_loss'], others[0].runs)}",
            f"  difference:   {compared['difference']:+.4f} s    {confidence} {low:+.4f} … {high:+.4f} s",
            f"  ratio:        {show_ratio(compared)}    ± is the standard error",
            f"  less time:    p = {compared['p']:.4g}    {show_test(compared)}; "
            f"two-sided p = {compared['p_two_sided']:.4g}"]
        if compared["paired"]:
            paired = compared["paired"]
            lines.append(f"  paired:       p = {paired['p']:.4g}    {show_test(paired)}; {paired['pairs']} interleaved "
                         "pairs, shown only")
        lines += ["" if compared["significant"] else insignificant, ""]
    if report["left_out"]:
        left_out = [f"  {logs.printable(item['path'])}: {item['reason']}" for item in report["left_out"]]
        lines += ["Left out:", *left_out, ""]
    lines += [f"Warning: {warning}" for warning in report["warnings"]]
    lines += ["", f"{report['verdict'].capitalize()}: {report['reason']}."]
    return [line for line, before in zip(lines, ["", *lines]) if line or before]  # no blank line after another


def show_runs(sides):
    """The single runs of sides that cannot be judged, as lines: no mean, since it may be one of unlike things."""
    lines = []
    for side in sides:
        lines.append(f"{side.name[0].upper()}{side.name[1:]} ({len(side.runs)} run{'s' * (len(side.runs) > 1)})")
        for run in side.runs[:MOST_SHOWN]:
            seconds = "no time" if run.train_time_ms is None else f"{run.train_time_ms / 1000:.3f} s"
            lines.append(f"  {logs.printable(run.path)}: loss {show_loss(run.final_loss, [run], 0)}, {seconds}")
        if len(side.runs) > MOST_SHOWN:
            lines.append(f"  and {len(side.runs) - MOST_SHOWN} more")
        lines += [f"  left out: {logs.printable(path)}: {reason}" for path, reason in dict.fromkeys(side.left_out)]
    return lines


def show_mean_loss(found, runs):
    spread = "" if found["sd"] is None else f" ± {show_loss(found['sd'], runs, 3)}"
    return show_loss(found["mean"], runs) + spread


def show_test(tested):
    return f"{tested['test'].split(',')[0]}, t = {tested['t']:.4f}, df {tested['df']:.4g}"


def show_time(time):
    spread = "" if time["sd"] is None else f" ± {time['sd']:.4f}"
    return f"{time['mean']:.4f}{spread} s"


def show_ratio(compared):
    """`1.00497 ± 0.00040 times faster`; the error has two digits that count."""
    ratio, error = compared["ratio"], compared["ratio_standard_error"]
    word = "faster"
    if ratio < 1:
        ratio, error, word = 1 / ratio, error / ratio**2, "slower"
    digits = min(9, max(2, 1 - math.floor(math.log10(error))))
    return f"{ratio:.{digits}f} ± {error:.{digits}f} times {word}"


def show_markdown(report):
    """A record's README section with its leaderboard row, as lines."""
    a = report["sides"][0]
    loss, time, compared = report["loss"], report["time"], report["comparison"]
    lines = ["## Results", "", f"**{report['verdict'].capitalize()}**: {report['reason']}.", "",
             "| run | val_loss | train_time (s) |", "|---|---|---|"]
    for run in a.runs:
        seconds = "-" if run.train_time_ms is None else f"{run.train_time_ms / 1000:.3f}"
        name = logs.printable(os.path.basename(run.path)).replace("|", "\\|")
        lines.append(f"| `{name}`{f' run {run.index_in_file}' if run.index_in_file > 1 else ''} | "
                     f"{run.final_loss:.{run.loss_decimals}f} | {seconds} |")
    lines += [f"| **mean ± σ** | **{show_mean_loss(loss, a.runs)}** | "
              f"**{show_time(time)[:-2] if time else '-'}** |", "",
              f"- Loss: n = {loss['n']}, p(mean < {loss['target']:g}) = {loss['p']:.4g} ({show_test(loss)})"]
    if compared:
        lines += [f"- Time before: {show_time(compared['other'])} (n = {compared['other']['n']}, mean ± σ)",
                  f"- Difference: {compared['difference']:+.4f} s, {show_ratio(compared)}, p = {compared['p']:.4g} "
                  f"({show_test(compared)})"]
    lines += [f"- Source: SHA-256 `{source or 'not in the logs'}`" for source in
              sorted({run.source_sha256 or "" for run in a.runs})]
    lines += [f"- Left out: `{logs.printable(item['path'])}`: {item['reason']}" for item in report["left_out"]
              if not item["reason"].startswith(logs.NOT_A_LOG)]
    lines += [f"- Warning: {warning}" for warning in report["warnings"]]
    dates = [run.start["started"][:10] for run in a.runs if run.start and isinstance(run.start.get("started"), str)]
    minutes = f"{time['mean'] / 60:.3f} minutes" if time else "-"
    folder = os.path.basename(os.path.dirname(os.path.abspath(a.runs[0].path)))
    return lines + ["", "| # | Record time | Description | Date | Log | Contributors |", "|---|---|---|---|---|---|",
                    f"| | {minutes} | (what changed) | {max(dates, default='(date)')} | [log]({folder}/) | (who) |"]


def as_json(report):
    """The report with runs for Sides, ready for json.dumps."""
    return {**{key: value for key, value in report.items() if key != "sides"}, **list_runs(report["sides"])}


def list_runs(sides):
    """The runs of Sides and what was left out, ready for json.dumps."""
    runs = [{"set": side.name, "path": run.path, "index_in_file": run.index_in_file, "val_loss": run.final_loss,
             "train_time_ms": run.train_time_ms, "source_sha256": run.source_sha256, "gpus": run.gpus}
            for side in sides for run in side.runs]
    left_out = dict.fromkeys(item for side in sides for item in side.left_out)
    return {"runs": runs, "left_out": [{"path": path, "reason": reason} for path, reason in left_out]}


def plot(report, path):
    """Three panels: loss over steps, final losses with their interval, times of the sets with theirs."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    loss, compared, confidence = report["loss"], report["comparison"], 1 - 2 * report["alpha"]
    sides = list(zip(report["sides"], _labels(report["sides"]), ("#1b6ac9", "#e07b39")))
    timed = all(side.timed for side in report["sides"])
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                            "grid.color": "#e6e6e6", "axes.axisbelow": True, "axes.titleweight": "bold",
                            "axes.titlelocation": "left", "axes.titlepad": 22})
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.6), width_ratios=(1.5, 1, 1), layout="constrained")
    curves, losses, times = panels

    def dots(axes, at, values, color):
        spread = np.linspace(-0.14, 0.14, len(values)) if len(values) > 1 else np.zeros(1)
        axes.plot(at + spread, values, "o", color=color, alpha=0.55, markersize=6, markeredgewidth=0)
        if len(values) > 1 and np.ptp(values) > 0:
            low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(confidence)
            mean = np.mean(values)
            axes.errorbar(at + 0.28, mean, [[mean - low], [high - mean]], fmt="D", color=color, capsize=5, markersize=5)

    for side, label, color in reversed(sides):
        for i, run in enumerate(side.runs):
            shown = [v for v in run.validations if v.step >= LATE * run.last_step]
            curves.plot([v.step for v in shown], [v.loss for v in shown], color=color, lw=1, alpha=0.6,
                        label=None if i else label)
    for at, (side, label, color) in enumerate(sides):
        dots(losses, at, side.losses, color)
        if timed:
            dots(times, at, side.seconds, color)
    for axes in (curves, losses):
        axes.axhline(loss["target"], color="#333333", lw=1, ls="--", label=f"target {loss['target']:g}")
    for axes in (losses, times):
        axes.set_xticks(range(len(sides)), [f"{label}\nn = {len(side.runs)}" for side, label, _ in sides])
        axes.set_xlim(-0.4, len(sides) - 0.5)
        axes.grid(False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.ticklabel_format(axis="y", useOffset=False)
    if not timed:
        times.set(xticks=[], yticks=[])
    curves.legend(frameon=False)

    bars = f"bars: mean, {100 * confidence:g} % CI"
    about_times = bars if timed else "no train_time in the logs"
    if compared:
        about_times = f"{show_ratio(compared)}, p = {compared['p']:.3g}"
    for axes, title, unit, about in (
            (curves, "Validation loss", "val_loss", f"one line a run, without the first {100 * LATE:g} % of its steps"),
            (losses, "Final loss", "val_loss", f"p(mean < {loss['target']:g}) = {loss['p']:.3g}    {bars}"),
            (times, "Time", "train_time (s)", about_times)):
        axes.set(title=title, ylabel=unit)
        axes.text(0, 1.03, about, transform=axes.transAxes, fontsize=8.5, color="#555555")
    curves.set_xlabel("step")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CannotJudge(f"cannot write the plot {logs.printable(path)} ({error}); give a .png in a folder that "
                          "exists") from None
    finally:
        pyplot.close(figure)


def _labels(sides):
    """What a plot calls the sides: their folders, where each has one of its own; else their names."""
    folders = [{os.path.basename(os.path.dirname(os.path.abspath(run.path))) for run in side.runs} for side in sides]
    if all(len(found) == 1 for found in folders) and len(set.union(*folders)) == len(sides):
        return [logs.printable(found.pop()) for found in folders]
    return [logs.printable(side.name.removeprefix("the ")) for side in sides]


def plan(options):
    """How many runs a claim needs, as a dict for --json. sd and margin come from the flags, or from the loss in logs;
    n is that of the runs in the logs, or None."""
    sd, margin, n = options.sd, options.margin, None
    if sd is None or margin is None:
        if not options.paths:
            raise CannotJudge("--plan wants --sd and --margin, or logs to take them from")
        side = gather("the set", "--source", logs.read(options.paths), options.source, options.gpus)
        check_one_experiment(side, options.mixed)
        loss = summary(side.losses)
        if sd is None:
            sd = loss["sd"]
        if margin is None:
            margin = choose_target(side.runs, options.target) - loss["mean"]
        n = loss["n"]
    if not (sd and sd > 0 and margin > 0 and math.isfinite(sd) and math.isfinite(margin)):
        raise CannotJudge(f"a plan wants sd and margin above 0, and they are {sd} and {margin}; give --sd and --margin")
    needed = []
    for sets, what in ((1, "mean below a target"), (2, "less than another set")):
        runs = runs_needed(sd, margin, options.alpha, options.power, sets)
        reached = power(runs, sd, margin, options.alpha, sets)
        needed.append({"claim": what, "sets": sets, "runs": runs, "power": reached})
    return {"sd": sd, "margin": margin, "n": n, "alpha": options.alpha, "power": options.power, "needed": needed}


def show_plan(found):
    """The plan as lines of text."""
    origin = "" if found["n"] is None else f", from the losses of {found['n']} runs"
    lines = [f"sd {found['sd']:.4g}, margin {found['margin']:.4g}{origin}; one-sided t-test at alpha "
             f"{found['alpha']:g}, power {found['power']:g}"]
    lines += [f"  {each['claim'] + ':':<24} {each['runs']} runs{' a side' if each['sets'] == 2 else ''} "
              f"(power {each['power']:.3f})" for each in found["needed"]]
    return [*lines, "Declare the number before the first run; running on until p < alpha is no test at this alpha."]


def parse(arguments):
    parser = argparse.ArgumentParser(description="Judges a record's claim from its run logs.", allow_abbrev=False,
                                     epilog="Exit status: 0 the claim holds, 1 it does not, 2 it cannot be judged.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="logs or folders of logs")
    parser.add_argument("--vs", nargs="+", metavar="PATH", help="logs to be faster than")
    parser.add_argument("--side", help="the paths hold one race: judge this side of it against the other")
    parser.add_argument("--target", type=float,
                        help=f"loss to be below (default: what the logs state, else {DEFAULT_TARGET})")
    parser.add_argument("--alpha", type=float, default=0.01, help="level of every test (default: %(default)s)")
    parser.add_argument("--source", metavar="HASH", help="judge only runs whose source's SHA-256 begins so")
    parser.add_argument("--vs-source", metavar="HASH", help="the same for --vs")
    parser.add_argument("--gpus", type=int, metavar="N", help="judge only runs on N GPUs")
    parser.add_argument("--mixed", action="store_true", help="judge runs of several experiments as one set")
    parser.add_argument("--plan", action="store_true", help="tell how many runs are needed, and judge nothing")
    parser.add_argument("--sd", type=float, help="for --plan: sd of a run")
    parser.add_argument("--margin", type=float,
                        help="for --plan: true distance of the mean from the target or the other set")
    parser.add_argument("--power", type=float, default=0.9,
                        help="for --plan: probability of finding it (default: %(default)s)")
    parser.add_argument("--plot", metavar="PNG", help="draw losses and times")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the record's README section and leaderboard row")
    form.add_argument("--json", action="store_true", help="print everything for programs")
    options = parser.parse_args(arguments)
    if not 0 < options.alpha < 0.5:
        parser.error(f"--alpha is {options.alpha}; it wants a number between 0 and 0.5")
    if not 0 < options.power < 1:
        parser.error(f"--power is {options.power}; it wants a number between 0 and 1")
    if options.target is not None and not math.isfinite(options.target):
        parser.error(f"--target is {options.target}; it wants a finite number")
    if options.side and options.vs:
        parser.error("--side takes both sets from PATH; leave out --vs")
    for name in ("vs", "vs_source", "side", "plot", "markdown") if options.plan else ("sd", "margin"):
        if getattr(options, name):
            flag = "--" + name.replace("_", "-")
            parser.error(f"--plan judges nothing; leave out {flag}" if options.plan else f"{flag} wants --plan; add it")
    if not options.paths and not options.plan:
        parser.error("no PATH was given; name logs, or a folder of logs")
    return options


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.plan:
            found = plan(options)
            print(logs.show_json(found) if options.json else "\n".join(show_plan(found)))
            return 0
        report = judge(options)
        if options.plot:
            plot(report, options.plot)
    except CannotJudge as reason:
        if options.json:
            print(logs.show_json({"verdict": "the claim cannot be judged", "reason": str(reason),
                                  **list_runs(reason.sides)}))
        elif reason.sides:
            print("\n".join(show_runs(reason.sides)), flush=True)
        print(f"The claim cannot be judged: {reason}.", file=sys.stderr)
        return 2
    if options.json:
        print(logs.show_json(as_json(report)))
    else:
        print("\n".join((show_markdown if options.markdown else show_report)(report)))
    return 0 if report["verdict"] == "the claim holds" else 1


if __name__ == "__main__":
    logs.run_main(main)
