"""Judge runs from their logs: how soon is the base's loss reached, and does a record's claim hold?

    python records/stats.py race/                     the race's ideas against its base
    python records/stats.py logs/*.txt                is the mean final loss below the target?
    python records/stats.py new/*.txt --vs old/*.txt  and is the new version faster?
    python records/stats.py new/*.txt --vs old/*.txt --rate 0.28  also seconds to the same loss
    python records/stats.py --plan --sd 0.0013 --margin 0.002  number of runs for such a claim

Exit status and --json: docs/racing.md.

The verdict on an idea is that of same_loss.py, with the race's short base, or with --rate: the nats
that the base loses per unit of ln(time).

The claim: the mean final loss is below the target (one-sided one-sample t-test, p < alpha) and,
with a second set, the mean train_time is below that set's. Both must hold, so a wrong claim passes
with probability alpha at most. The test of times is the one that race.jsonl declared before the
first run: the paired t-test of log time, or Welch's. Two sets without a declaration are compared by
Welch's t-test of seconds, as public records do. Intervals of the claim have confidence 1 - 2 alpha.

The number of runs must be fixed before the first one: stopping as soon as p < alpha passes a wrong
claim about six times as often. For a race that was declared to run until it is decided, `bounds`
keep alpha over all looks.

Right-skewed losses make the t-test lenient: at alpha 1 % it passes 5 to 7 % of wrong claims on
exponential losses, and 9 % with looks. From ten runs on the p-value of a bootstrap-t is printed; a
race until decided must show the claim by it too. Welch's test passes 1.4 % with 3 runs and sd 1:5
(all simulated).
"""

import argparse
import bisect
import contextlib
import functools
import json
import math
import os
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import scipy.stats

import logs
import pages
import same_loss
from logs import UserError, brief, config_of, plural, require
from manifest import ALPHA, MANIFEST, SHORT, declaration, race_of, side_of
from same_loss import BETTER, LEVEL, NO_DIFFERENCE, NOT_JUDGED, WORSE

# t of equal values: p is nan then
warnings.filterwarnings("ignore", category=RuntimeWarning, module="scipy")

HOLDS = "the claim holds"
FAILS = "the claim does not hold"
UNJUDGED = "the claim cannot be judged"
NO_CLAIM = "no claim was declared"
OTHER = "this is not the declared claim"
# of ideas; of several the first that one of them has is that of all
VERDICTS = BETTER, NOT_JUDGED, NO_DIFFERENCE, WORSE
DEFAULT_TARGET = 3.28  # FineWeb, the public speedrun's main track
LATE = 0.1  # part of a run in which a clock may be reset after the warm-up
MOST_RUNS = 1_000_000  # in a plan
MOST_SHOWN = 20  # runs of a side that cannot be judged
MOST_TITLES = 3  # ideas in the title of a plot
# a race until decided stops if the claim has a smaller chance of being shown at the last look
FUTILE = 0.05
# times a plan's runs, and one more, give such a race the plan's power; on average it takes fewer
LONGER = 1.15
# fewer runs: its p is above alpha in 29 % of good cases with 5
RESAMPLES = 9999
BOOTSTRAP_N = 10
SCRIPT = "train_gpt.py"  # what is raced
PICTURE = "race.png"  # written by race.py beside the logs


class Mixed(UserError):
    """The runs belong to several experiments. seen: the message without this program's advice."""

    def __init__(self, seen, advice):
        super().__init__(f"{seen}; {advice}")
        self.seen = seen


class Undecided(UserError):
    """A race that runs until it is decided is still open."""


# Statistics. Arrays of runs [..., n]; tests over the last axis

# One-sided t-tests of: mean(losses) < target; Welch's of mean(times) < mean(others); the paired one
# of times < others
welch_t = functools.partial(scipy.stats.ttest_ind, axis=-1, equal_var=False)
one_sample_t_less = functools.partial(scipy.stats.ttest_1samp, axis=-1, alternative="less")
welch_t_less = functools.partial(welch_t, alternative="less")
paired_t_less = functools.partial(scipy.stats.ttest_rel, axis=-1, alternative="less")


def bootstrap_t_less(losses, target):
    """Return p of mean < target by the bootstrap-t (Efron and Tibshirani 1993), robust to skew; 1
    for equal losses.

    Two rounded losses are often equal at a race's first look, and the t-test gives p = 0 then.
    losses [n]"""
    if np.ptp(losses) == 0:
        return 1.0
    draw = np.random.default_rng(0)
    losses = np.asarray(losses, dtype=float)
    again = draw.choice(losses, (max(199, min(RESAMPLES, 2 * 10**6 // len(losses))), len(losses)))
    spread = again.std(-1, ddof=1)
    shifts = (again.mean(-1) - losses.mean()) / np.where(spread > 0, spread, 1e-300)
    return (1 + np.sum(shifts <= (losses.mean() - target) / losses.std(ddof=1))) / (1 + len(again))


def power(n, sd, margin, alpha, sets=1):
    """Return the power of a one-sided t-test of n runs against a fixed target, or with sets=2 of n
    a side by Welch's.

    Welch's degrees of freedom depend only on the share of each sample variance in their sum. The
    share is beta-distributed and independent of the sum; given the share, t is noncentral t."""
    df = assumed_df = sets * (n - 1)
    if sets == 2:
        share = scipy.stats.beta.ppf((np.arange(200) + 0.5) / 200, df / 4, df / 4)
        assumed_df = (n - 1) / (share**2 + (1 - share) ** 2)
    cut = scipy.stats.t.isf(alpha, assumed_df)
    return float(np.mean(scipy.stats.nct.sf(cut, df, margin / sd * math.sqrt(n / sets))))


def runs_needed(sd, margin, alpha, wanted, sets=1):
    """Return the least n (a side) with the wanted power. Raise UserError above MOST_RUNS."""
    n = bisect.bisect_left(
        range(MOST_RUNS + 1), wanted, 2, key=lambda n: power(n, sd, margin, alpha, sets)
    )
    require(
        n <= MOST_RUNS,
        f"a margin of {margin:g} at sd {sd:g} needs more than {MOST_RUNS:,} runs; use a larger one",
    )
    return n


@functools.lru_cache
def bounds(most, alpha):
    """Return the p-values [most - 1] below which a t-test decides after 2, 3, ..., `most` runs, at
    total level alpha.

    Alpha is spent by the O'Brien-Fleming-type function of Lan and DeMets (Biometrika 70, 1983, p.
    659). The bounds are exact for a one-sample or paired t-test. Let θ = arccot(t / √(n - 1)) be
    the angle between the runs and the diagonal. One more normal run turns √(n - 1) cos θ into √n
    cos θ' = √(n - 1) cos θ cos φ + sin φ, where √(n - 1) tan φ is t-distributed with n - 1 degrees
    of freedom, whatever the sd (Jennison and Turnbull, Biometrika 78, 1991, p. 133, integrate the
    same way). Welch's test uses the same p-values ("significance level approach")."""
    t = scipy.stats.t
    edges = scipy.stats.norm.sf(np.linspace(7.5, -7.5, 401))  # cells of the p-value so far
    edges[0] = 0
    edges[-1] = 1
    mass = np.diff(edges)
    left = edges
    found = []
    spent = 0.0

    def angle(p, n):
        return np.arctan2(math.sqrt(n - 1), t.isf(p, n - 1))

    for n in range(2, most + 1):
        if n > 2:
            before = math.sqrt(n - 1) * np.cos(angle((left[:-1] + edges[1:]) / 2, n - 1))[:, None]
            turn = np.arctan(before)
            reach = np.arcsin(
                np.clip(math.sqrt(n) * np.cos(angle(edges, n)) / np.hypot(1, before), -1, 1)
            )

            def below(phi):
                return t.cdf(
                    math.sqrt(n - 1) * np.tan(np.clip(phi, 1e-12 - np.pi / 2, np.pi / 2 - 1e-12)),
                    n - 1,
                )

            arrived = (
                below(np.pi - reach - turn) - below(reach - turn) + below(-np.pi - reach - turn)
            )
            arrived[:, 0] = 0
            arrived[:, -1] = 1
            mass = mass @ np.diff(arrived)
        now = 2 * scipy.stats.norm.sf(scipy.stats.norm.isf(alpha / 2) * math.sqrt(most / n))
        found.append(float(np.interp(now - spent, np.cumsum([0, *mass]), edges)))
        # the part that continues
        spent = now
        left = np.maximum(edges, found[-1]).clip(max=np.append(edges[1:], 1))
        mass = mass * (edges[1:] - left[:-1]) / np.diff(edges)
    return tuple(found)


def predictive_power(found, n, most, last):
    """Return the probability, given n runs, that a one-sided test after `most` runs has p below
    the last bound.

    Predictive power (Spiegelhalter, Freedman and Blackburn 1986) with the sd as observed. Stopping
    a race for futility can only lower the probability of passing a wrong claim."""
    if n == most:
        return 1.0 * (found.pvalue < last)
    short = scipy.stats.t.isf(last, most - 1) / math.sqrt(most) + found.statistic / math.sqrt(n)
    return scipy.stats.t.sf(short / math.sqrt(1 / n - 1 / most), n - 1)


def evaluate_looks(tests, n, most, alpha, losses=None, target=None):
    """Evaluate the looks after 2, 3, ..., n of at most `most` runs a side; all tests must show
    their claim.

    tests: functions of the number of runs. With losses [n], the first test is theirs, and passes
    only where their bootstrap-t also has p < alpha. Return the decision as a dict, or None."""
    limits = bounds(most, alpha)
    passed = [None] * len(tests)
    for look in range(2, n + 1):
        found = [test(look) for test in tests]
        shown = [one.pvalue < limits[look - 2] for one in found]
        if losses is not None and shown[0] and not passed[0]:
            shown[0] = bool(bootstrap_t_less(losses[:look], target) < alpha)
        passed = [at or (look if this else None) for at, this in zip(passed, shown)]
        chances = [
            1.0 if at else predictive_power(one, look, most, limits[-1])
            for at, one in zip(passed, found)
        ]
        if all(passed) or look == most or min(chances) < FUTILE:
            return {
                "n": look,
                "most": most,
                "bound": limits[look - 2],
                "passed": passed,
                "chance": float(min(chances)),
                "outcome": (
                    "the claim" if all(passed) else "futility" if look < most else "the last look"
                ),
            }
    return None


def summary(values):
    """Return n, mean, sample standard deviation (n - 1; None for one value) and range as a dict."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {
        "n": len(values),
        "mean": float(np.mean(values)),
        "sd": sd,
        "min": float(np.min(values)),
        "max": float(np.max(values)),
    }


def _interval(two_sided, alpha):
    return [float(end) for end in two_sided.confidence_interval(1 - 2 * alpha)]


def judge_loss(losses, target, alpha):
    """Return the loss part of a verdict as a dict. Raise UserError where a t-test is undefined."""
    found = summary(losses)
    require(
        found["n"] > 1,
        f"a test needs at least 2 runs, and there is {found['n']}; add runs (see --plan)",
    )
    require(
        np.ptp(losses),
        f"all {found['n']} losses are {losses[0]}: with sd 0 a t-test is not defined; use distinct "
        "seeds, and log more decimals",
    )
    test = one_sample_t_less(losses, target)
    return {
        **found,
        "target": target,
        "interval": _interval(scipy.stats.ttest_1samp(losses, target), alpha),
        "p_bootstrap": (
            float(bootstrap_t_less(losses, target)) if found["n"] >= BOOTSTRAP_N else None
        ),
        "test": "one-sided one-sample t-test, mean < target",
        "t": float(test.statistic),
        "df": float(test.df),
        "p": float(test.pvalue),
    }


def compare_times(sides, verdict, alpha):
    """Return the claim that the first of two Sides takes less time as a dict: the test of their
    Verdict, one-sided."""
    seconds = [side.seconds for side in sides]
    declared = sides[0].declared.get("test")
    found = verdict.time
    fewest = min(map(len, seconds))
    require(
        fewest > 1, f"comparing times needs at least 2 runs a side, and one has {fewest}; add runs"
    )
    require(
        verdict.paired or declared != "paired",
        "race.jsonl declares the paired test, and these runs give no "
        "pairs; pass the logs of the whole race",
    )
    require(
        found.p is not None,
        "the times, or the ratios of pairs, are all equal: with sd 0 a t-test is not defined; "
        "log milliseconds",
    )
    kinds = {
        None: "Welch t-test of",
        "unpaired": "Welch t-test of log",
        "paired": "paired t-test of log",
    }
    part = {
        "other": summary(seconds[1]),
        "test": f"one-sided {kinds[declared]} time",
        "t": found.t,
        "df": found.df,
        "p": found.p / 2 if found.t < 0 else 1 - found.p / 2,
    }
    if not declared:
        part |= {
            "difference": float(np.subtract(*map(np.mean, seconds))),
            "p_two_sided": found.p,
            "interval": _interval(welch_t(*seconds), alpha),
        }
    return part


# A side against the base


@dataclass
class Contrast:
    """A fact without a verdict: the difference of a side's loss to the base's in nats, or the ratio
    of its time to the base's, with the 95 % interval (None without a spread).

    t, df, p: of the two-sided test; a claim reads those of the time."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    t: float | None = None
    df: float | None = None


@dataclass
class Verdict:
    """What the runs of a side show against the base. time is None without clocks; the means are of
    the two sides; answer: the time to the base's loss, None if `why` says that it is not judged."""

    name: str
    base: str
    n: int
    paired: bool
    mean_loss: float
    base_loss: float
    loss: Contrast
    mean_seconds: float | None
    base_seconds: float | None
    time: Contrast | None
    answer: same_loss.Answer | None
    why: str
    bits: list  # per byte: of the side and of the base, None where logs lack it

    @property
    def outcome(self):
        """One of VERDICTS."""
        return self.answer.verdict if self.answer else NOT_JUDGED

    @property
    def sentence(self):
        """The answer in words."""
        found = self.answer
        if not found:
            return f"is {NOT_JUDGED}: {self.why}"
        said = (
            f"reaches the base's loss in {number(found.ratio)} of its time ({number(found.low)} to"
            f" {number(found.high)}), p = {found.holm:.2g}: {self.outcome}"
        )
        if self.outcome == NO_DIFFERENCE:
            said += (
                f" shown; {plural(self.n, 'run')} a side show a gain of {100 * found.shows:.2g} %"
            )
        return said

    @property
    def note(self):
        """How the answer is known."""
        found = self.answer
        if not found:
            return ""
        said = {
            same_loss.SAME_WORK: "same work a step, so times are in the ratio of the steps",
            same_loss.BY_TURNS: "times by turns, step by step",
            same_loss.FROM_RUNS: "times from the runs",
        }[found.how]
        said += f"; the base's rate: {found.rate:.3g} nats per unit of ln(time)"
        if (found.reach or 0) > same_loss.FAR:
            said += (
                f"; the loss differs by {found.reach:.1f} times what the short base loses, so the"
                " ratio is a guide: --confirm races it"
            )
        return said


def number(ratio):
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}"


def contrast(ours, base, paired):
    """Compare the means of two arrays by a paired t-test or Welch's."""
    ours = np.asarray(ours, dtype=float)
    base = np.asarray(base, dtype=float)
    found = Contrast(float(np.mean(ours) - np.mean(base)))
    samples = [ours - base] if paired else [ours, base]
    if min(len(ours), len(base)) < 2 or max(map(np.ptp, samples)) <= same_loss.EQUAL:
        return found
    test = scipy.stats.ttest_rel(ours, base) if paired else welch_t(ours, base)
    found.low, found.high = _interval(test, LEVEL / 2)
    found.t = float(test.statistic)
    found.df = float(test.df)
    found.p = float(test.pvalue)
    return found


def contrast_times(ours, base, paired, declared):
    """Compare the logarithms of two arrays of seconds, but test the seconds where no test was
    declared."""
    found = contrast(np.log(ours), np.log(base), paired and declared == "paired")
    found.value, found.low, found.high = (
        end if end is None else math.exp(end) for end in (found.value, found.low, found.high)
    )
    if not declared and found.p is not None:
        raw = welch_t(ours, base)
        found.t = float(raw.statistic)
        found.df = float(raw.df)
        found.p = float(raw.pvalue)
    return found


def holm(values):
    """Return the p-values with Holm's correction (Scandinavian Journal of Statistics 6, 1979)."""
    order = np.argsort(values)
    stepped = np.maximum.accumulate(np.arange(len(values), 0, -1) * np.asarray(values)[order])
    return np.minimum(1, stepped)[np.argsort(order)].tolist()


def rate_of(race, by_hand):
    """Return (the Rate of a race's base, why there is none)."""
    if by_hand:
        return same_loss.rate_by_hand(by_hand), ""
    if race.get("trial"):
        return None, "a trial shows that everything works, and supports no claim"
    short = race.get("short_base")
    if not short:
        return None, "no short base, so only loss and time as facts; --rate NATS gives its rate"
    pairs = {int(seed): losses for seed, losses in short["losses"].items()}
    rate = same_loss.exchange_rate(pairs, math.log(short["base_steps"] / short["steps"]))
    return rate, (
        f"{short['steps']} steps in place of {short['base_steps']} do not raise the base's loss for"
        " certain, so its rate is unknown; race longer runs"
    )


def speed_of(race, side):
    """Return the Speed of a side of a race, from its turns, else for the times of its runs."""
    turns = race.get("turns", {}).get(side.name.removeprefix("side "))
    if not turns:
        return same_loss.Speed(same_loss.FROM_RUNS)
    steps = math.log(turns["steps"][0] / turns["steps"][1])
    if turns["same_work"]:
        return same_loss.Speed(same_loss.SAME_WORK, steps)
    return same_loss.Speed(
        same_loss.BY_TURNS, turns["log_ratio"] + steps, turns["variance"], turns["df"]
    )


def judge_idea(side, base, timed, by_hand, ideas):
    """Return (the Answer of a side against the base, why there is none)."""
    rate, why = rate_of(side.declared, by_hand)
    if not rate:
        return None, why
    speed = speed_of(side.declared, side)
    if speed.how == same_loss.FROM_RUNS and not timed:
        return None, "the logs state no time of whole runs"
    matched = pair_up(side, base)
    # a run's number is its seed in a race
    first = side.declared.get("seed", 0)
    samples = []
    for one in (side, base):
        seconds = np.log(one.seconds) if timed else [0.0] * len(one.runs)
        names = [first + int(race_of(run).run) for run in one.runs] if matched else None
        samples.append(
            dict(zip(names or range(id(one), id(one) + 10**6), zip(one.losses, seconds)))
        )
    found = same_loss.time_to_same_loss(*samples, rate, speed, ideas)
    if found:
        return found, ""
    one = "one run a side shows no spread; race with -n 5"
    return None, one if len(side.runs) < 2 else "all runs differ by the same amount"


def verdicts(pairs, by_hand=None):
    """Return the Verdict of each (Side, base Side), with Holm's correction for all of them.

    by_hand: the base's rate in nats per unit of ln(time), of runs without a short base."""
    found = []
    for side, base in pairs:
        if side.declared.get("out"):  # an idea that left has its first runs only
            numbers = {race_of(run).run for run in side.runs}
            base = replace(base, runs=[run for run in base.runs if race_of(run).run in numbers])
        matched = pair_up(side, base)
        side, base = in_turn(side, base)
        timed = not any(one.untimed or one.clock_reset for one in (side, base))
        seconds = [one.seconds if timed else [] for one in (side, base)]
        losses = [one.losses for one in (side, base)]
        means = [float(np.mean(values)) if values else None for values in (*losses, *seconds)]
        test = side.declared.get("test")
        found.append(
            Verdict(
                side.label,
                base.label,
                min(map(len, losses)),
                bool(matched),
                *means[:2],
                contrast(*losses, bool(matched)),
                *means[2:],
                contrast_times(*seconds, bool(matched), test) if timed else None,
                *judge_idea(side, base, timed, by_hand, len(pairs)),
                [float(np.mean(one.bits)) if all(one.bits) else None for one in (side, base)],
            )
        )
    answers = [one.answer for one in found if one.answer]
    for answer, corrected in zip(answers, holm([answer.p for answer in answers])):
        answer.holm = corrected
    return found


def show_verdicts(found):
    """Return the answers in words, then the table of facts."""
    said = [pages.wrap(f"{one.name} {one.sentence}.") for one in ranked(found)]
    notes = {}
    for one in found:
        if one.note:
            notes.setdefault(one.note, []).append(one.name)
    for note, names in notes.items():
        whose = f"{logs.some(names, 3)}: " if len(notes) > 1 else ""
        said.append(pages.wrap(f"{whose}{note}." if whose else f"{note[0].upper()}{note[1:]}."))
    return "\n".join([*said, "", table_of_verdicts(found)])


def ranked(found):
    """Return Verdicts, those that are sooner at the base's loss first."""
    return sorted(found, key=lambda one: (one.answer is None, one.answer and one.answer.ratio))


def conclusion(found):
    """Return how many Verdicts have each outcome, in words."""
    counts = Counter(one.outcome for one in found)
    said = (f"{counts[each]} {each}" for each in VERDICTS if counts[each])
    return f"{plural(len(found), 'idea')}: {', '.join(said)}"


def table_of_verdicts(found):
    """Return the table of facts as text: each base and its sides."""

    def row(name, loss, bits, seconds, of_loss=None, of_time=None):
        return [
            textwrap.shorten(name, 28, placeholder=" …"),
            f"{loss:.4f}",
            "-" if bits is None else f"{bits:.4f}",
            show_contrast(of_loss, "+.4f"),
            "-" if seconds is None else f"{seconds:.3f}",
            show_contrast(of_time, ".3f"),
        ]

    facts = "mean loss", "bits/byte", "difference (95 % CI)", "mean s", "ratio of times (95 % CI)"
    rows = [["", *facts]]
    for one in found:
        bits, base_bits = one.bits
        base = row(one.base, one.base_loss, base_bits, one.base_seconds)
        rows += [base] * (base not in rows)
        rows.append(row(one.name, one.mean_loss, bits, one.mean_seconds, one.loss, one.time))
    return logs.columns(rows)


def show_contrast(found, form):
    if found is None:
        return ""
    interval = "" if found.p is None else f" ({found.low:{form}} … {found.high:{form}})"
    return f"{found.value:{form}}{interval}"


# For people and programs: one verdict


def answer(sides, found, claim=None, reason=None, looked=False):
    """Return what is shown, as --json prints it (docs/racing.md lists the fields).

    sides: the ideas', then the base's; found: the Verdict of each idea; claim and reason: as
    judge() reports them; looked: whether looks decided the race by its claim. A claim alone gives
    status 0 only where no idea was judged otherwise."""
    *ideas, base = sides
    judged = [one.outcome for one in found]
    verdict = next((each for each in VERDICTS if each in judged), NOT_JUDGED)
    of_claim = claim in (HOLDS, FAILS) and (
        verdict == NOT_JUDGED or looked and verdict != WORSE or not found
    )
    best = next((one.name for one in ranked(found) if one.outcome == BETTER), None)
    if of_claim:
        verdict = claim.removeprefix("the ")
        best = best if claim == HOLDS else None
    elif claim == OTHER:
        verdict = NOT_JUDGED
        best = None
    elif found:
        said = (f"{one.name} {one.sentence}" for one in ranked(found) if one.outcome == verdict)
        reason = logs.some(said, 3, "; ")

    def part(contrast, name):
        return contrast and {name: contrast.value, "low": contrast.low, "high": contrast.high}

    def mean(values):
        return {key: summary(values)[key] for key in ("mean", "sd")}

    folders = {os.path.dirname(os.path.abspath(run.path)) for side in sides for run in side.runs}
    status = 2 if verdict == NOT_JUDGED else 0 if best or of_claim and claim == HOLDS else 1
    return {
        **logs.not_judged(reason, folders.pop() if len(folders) == 1 else None, status),
        "verdict": verdict,
        "best": best,
        "sides": [
            {
                "name": side.label,
                "role": "base" if side is base and ideas else "idea" if ideas else "base",
                "n": len(side.runs),
                "loss": mean(side.losses),
                "bits_per_byte": mean(side.bits) if all(side.bits) else None,
                "seconds": None if side.untimed else mean(side.seconds),
            }
            for side in sides
        ],
        "ideas": [
            {
                "name": one.name,
                "verdict": verdict if looked and of_claim else one.outcome,
                "reason": one.sentence,
                "to_same_loss": one.answer and asdict(one.answer),
                "loss": part(one.loss, "difference"),
                "time": part(one.time, "ratio"),
            }
            for one in found
        ],
    }


def last_line(found):
    """Return an answer() about ideas in a line: the verdict and its idea, the best idea first."""
    verdict = found["verdict"]
    ideas = sorted(found["ideas"], key=lambda idea: idea["name"] != found["best"])
    names = [idea["name"] for idea in ideas if idea["verdict"] == verdict] or [
        f"{idea['name']} is {idea['verdict']}" for idea in ideas
    ]
    return pages.wrap(
        f"Verdict: {verdict}: {found['reason'] if verdict == NOT_JUDGED else logs.some(names, 3)}."
    )


# The runs that are judged

# What decides a run's time or loss, as its log states it. Sets that differ in one are not compared;
# the first two must be stated
FACTS = {
    "on different numbers of GPUs": lambda run: run.gpus,
    "on different GPUs": lambda run: run.card,
    "on different CPUs": lambda run: run.cpu,
    "with different numbers of threads": lambda run: run.threads,
    "with different versions of torch": lambda run: run.torch,
    "with different drivers": lambda run: run.driver,
    "validated on different data": lambda run: run.validated_on,
    "with different targets": lambda run: (run.start or {}).get("target_val_loss"),
}


@dataclass
class Side:
    """A set of runs: those judged, those left out with the reason, and warnings."""

    name: str
    runs: list
    rejected: list = field(default_factory=list)  # of all sides
    declared: dict = field(default_factory=dict)  # the race's declaration
    left_out: list = field(default_factory=list)  # (path, reason)
    warnings: list = field(default_factory=list)

    @property
    def label(self):
        """What the side is: its flags or revision; its name if no race declares them."""
        names = logs.side_names(self.declared) if self.declared else {}
        return logs.printable(names.get(self.name.removeprefix("side "), names.get("", self.name)))

    @property
    def losses(self):
        return [run.exact_loss for run in self.runs]

    @property
    def bits(self):
        """The final losses in bits per byte of text, None where a log does not state it."""
        return [(run.end or {}).get("bits_per_byte") for run in self.runs]

    @property
    def seconds(self):
        return [run.train_time_ms / 1000 for run in self.runs]

    @property
    def untimed(self):
        """Runs without a positive train_time on the last validation line."""
        return [run for run in self.runs if run.train_time_ms is None or run.train_time_ms <= 0]

    @property
    def clock_reset(self):
        """Runs whose clock fell back, except once after a warm-up: their last time does not cover
        the whole run."""
        return [
            run
            for run in self.runs
            if len(run.clock_falls) > 1
            or any(step > LATE * run.last_step for step in run.clock_falls)
        ]


def list_names(items):
    """Return file names of runs for a message, at most four."""
    return logs.some(logs.printable(os.path.basename(item.path)) for item in items)


def grouped(runs, key):
    """Return {key: runs}."""
    groups = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return groups


def gather(name, found, options, source=None, race_side=None):
    """Build a Side from the result of logs.read, restricted to a source, a side of a race, and the
    options."""
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    require(
        not unreadable,
        "; ".join(f"{logs.printable(item.path)}: {item.reason}" for item in unreadable),
    )

    side = Side(name, [], found.rejected, declaration(found.runs) if found.runs else {})
    side.left_out = [
        (item.path, item.reason) for item in found.rejected if not logs.is_beside(item)
    ]
    side.left_out += [
        (item.path, f"{item.reason}: {logs.printable(item.original_path)}")
        for item in found.duplicates
    ]
    for run in found.runs:
        letter = race_of(run).side if race_of(run) else None
        if letter == SHORT or race_side not in (None, letter):
            continue
        if source and not (run.source_sha256 or "").startswith(source.lower()):
            side.left_out.append((run.path, f"of another source than {source}"))
        elif run.disqualified:
            side.left_out.append((run.path, run.disqualified))
        else:
            side.runs.append(run)
    unused = side.left_out or [
        (
            item.path,
            (
                "no run of this race has ended"
                if os.path.basename(item.path) == MANIFEST
                else item.reason
            ),
        )
        for item in found.rejected
    ]
    reasons = "; ".join(f"{logs.printable(path)}: {reason}" for path, reason in unused[:3])
    require(
        side.runs,
        f"{side.label} holds no run that can be used ({reasons or 'nothing was found'}); name"
        " logs, or a folder of logs",
    )
    incomplete = [item for item in found.rejected if item.kind == logs.INCOMPLETE]
    if incomplete:
        side.warnings.append(
            f"started but not counted: {list_names(incomplete)}; give the reason in the record, or "
            "the claim rests on a selection"
        )
    return side


def check_one_experiment(side):
    """Raise Mixed if the runs belong to several experiments."""

    def must_agree(what, key, advice="pass the logs of one", shown="{} ({}: {})"):
        """Require one key(run) of all runs; None is ignored. {} in advice: an example."""
        groups = grouped((run for run in side.runs if key(run) is not None), key)
        if len(groups) > 1:
            listed = logs.some(
                shown.format(value, len(runs), list_names(runs)) for value, runs in groups.items()
            )
            raise Mixed(
                f"{side.label} holds runs {what}: {listed}",
                advice.format(next(value for value in groups if value != "none")),
            )

    sources = {run.source_sha256 for run in side.runs}
    configs = {id(run): config_of(run) for run in side.runs}
    must_agree(
        f"of {len(sources)} sources",
        lambda run: run.source_sha256 or "none",
        "choose one, for instance with --source {:.8} (of the second set --vs-source)",
        "{:.8} ({}: {})",
    )
    names = {name for config in configs.values() for name in config}
    for name in sorted(
        names, key=lambda name: (name != "num_steps", name)
    ):  # others follow from the number of steps
        must_agree(
            f"whose {name} differs",
            lambda run: json.dumps(configs[id(run)].get(name)),
            shown="{} ({})",
        )
    if len(sources) == 1:
        must_agree(
            "of different lengths in steps",
            lambda run: run.last_step if run.stated_steps is None else run.stated_steps,
        )
    numbers, *of_machine, data, _ = FACTS.items()  # choose_target looks at the targets
    must_agree(*numbers)
    must_agree(*data)
    for what, key in of_machine:
        if len(found := {key(run): None for run in side.runs if key(run) is not None}) > 1:
            side.warnings.append(
                f"{side.label} holds runs {what}: {logs.some(found)}: its times are of several"
                " machines, and losses may differ too"
            )
    must_agree("of different races", lambda run: (side_of(run) or ["none"])[0], shown="{} ({})")
    if sources == {None}:
        side.warnings.append(
            f"the logs of {side.label} hold no source: they may belong to several experiments"
        )
    if not all(map(race_of, side.runs)):
        side.warnings.append(
            f"{side.label} declares no number of runs: the verdict is valid only if the number was "
            "fixed before the first run, and every run that was started is here"
        )

    repeats = grouped(
        (run for run in side.runs if run.seed is not None),
        lambda run: json.dumps([run.seed, run.source_sha256, configs[id(run)]], sort_keys=True),
    )
    for runs in repeats.values():
        require(
            len(runs) == 1,
            f"{len(runs)} runs of {side.label} share the seed {json.dumps(runs[0].seed)}"
            f" ({list_names(runs)}): they are not independent, and p would be too small; race with"
            " distinct seeds",
        )


def check_complete(side):
    """Raise UserError unless each race has exactly its declared runs, or the first ones if it ends
    when decided."""
    for which, runs in grouped(side.runs, side_of).items():
        if which is None:
            continue
        where = f"race {which[0]}" + (f", {side.label}" if which[1] else "")
        declared = list(dict.fromkeys(str(race_of(run).declared_n) for run in runs))
        numbers = Counter(race_of(run).run for run in runs)
        twice = [number for number, count in numbers.items() if count > 1]
        require(
            not twice,
            f"{where}: run {', '.join(twice)} is there more than once; pass each run once",
        )
        are_first = numbers.keys() == {str(i + 1) for i in range(len(runs))}
        whole = (
            declared == [str(len(runs))]
            or len(declared) == 1
            and are_first
            and (side.declared.get("until_decided") or which[1] in side.declared.get("out", {}))
        )
        failed = [item for item in side.rejected if side_of(item) == which]
        why = "".join(
            f"; run {race_of(item).run} ({list_names([item])}): {item.reason}" for item in failed
        )
        why += "".join(
            f"; {os.path.basename(path)}: {reason}"
            for path, reason in side.left_out
            if reason.startswith(("resumed at", "begun from"))
        )
        require(
            whole,
            f"{where}: {' or '.join(declared)} runs were declared and {len(runs)} can be used{why};"
            " pass the logs of all, or race again",
        )


def check_none_diverged(side):
    """Raise UserError if a run diverged: it is evidence against the claim, and cannot enter a
    mean."""
    sources = {run.source_sha256 for run in side.runs}
    races = set(map(side_of, side.runs))
    diverged = [
        item
        for item in side.rejected
        if item.kind == logs.NOT_FINITE and item.source_sha256 in sources and side_of(item) in races
    ]
    reason = diverged[0].reason if diverged else ""
    require(
        not diverged,
        f"{list_names(diverged)} of {side.label} diverged ({reason}): a run that was started and is"
        " evidence against the claim; fix the cause and race again",
    )


def add_warnings(side):
    """Add the logs' own notes, and what is wrong with their times, to the warnings."""
    for note, count in Counter(note for run in side.runs for note in run.notes).items():
        side.warnings.append(f"{note} ({count} of {plural(len(side.runs), 'run')} of {side.label})")
    if side.untimed:
        stopped = [run for run in side.untimed if run.train_time_ms is not None]
        side.warnings += [
            f"train_time is not above zero on the last line of {list_names(stopped)}: the times are"
            " not judged"
        ] * bool(stopped)
    elif side.clock_reset:
        side.warnings.append(
            f"the clock was reset during training ({list_names(side.clock_reset)}): the time does"
            " not cover the whole run"
        )


def choose_target(runs, given):
    """Return the given target, else the one that all logs state, else the default; None if they
    state 0, for none."""
    if given is not None:
        return given
    stated = list(
        {
            json.dumps(target): target for target in map(FACTS["with different targets"], runs)
        }.values()
    )
    if stated == [None]:
        return DEFAULT_TARGET
    require(
        len(stated) == 1 and type(stated[0]) in (int, float) and math.isfinite(stated[0]),
        f"the logs state the targets {', '.join(map(str, stated))}; choose with --target",
    )
    return float(stated[0]) or None


def pair_up(*sides):
    """Return the sides' runs of one race in pairs of the same number, in order; None unless every
    run has a pair."""
    numbered = [
        {(race.race_id, race.run): run for run in side.runs if (race := race_of(run))}
        for side in sides
    ]
    keys = numbered[0].keys()
    if len(keys) < 2 or any(
        len(side.runs) != len(runs) or runs.keys() != keys for side, runs in zip(sides, numbered)
    ):
        return None
    return [
        [runs[key] for runs in numbered] for key in sorted(keys, key=lambda key: (len(key[1]), key))
    ]


def choose_sides(options):
    """Return the Sides that options name: of a race its ideas and the base, else one or two sets."""
    found = logs.read(options.paths)
    raced = {race_of(run).side for run in found.runs if race_of(run)} - {"", SHORT}
    out = declaration(found.runs).get("out", {}) if raced and not options.vs else {}
    raced = sorted(raced - {side for side, why in out.items() if why["failed"]})
    if options.side or len(raced) > 1 and not options.vs:
        require(
            len(raced) > 1 and options.side in (None, *(raced if len(raced) == 2 else raced[:-1])),
            f"--side {options.side} needs the logs of a race with that side and a base; these have"
            f" {', '.join(raced) or 'no sides'}; pass all logs of one race",
        )
        ideas = [options.side] if options.side else raced[:-1]
        # of two sides the second may be judged against the first
        base = next(side for side in reversed(raced) if side not in ideas)
        sources = [*[options.source] * len(ideas), options.vs_source]
        return [
            gather(f"side {side}", found, options, source, side)
            for side, source in zip([*ideas, base], sources)
        ]
    require(
        len(raced) < 2,
        f"these are logs of the sides {', '.join(raced)} of a race; leave out --vs",
    )
    sets = [
        (found, options.source),
        *([(logs.read(options.vs), options.vs_source)] if options.vs else []),
    ]
    return [
        gather(name, of_set, options, source)
        for name, (of_set, source) in zip(names_of_sets(options), sets)
    ]


def names_of_sets(options):
    """Return the names of the runs that are judged, and of those of --vs."""
    return [
        f"source {source}" if source else name
        for name, source in (("the set", options.source), ("the --vs set", options.vs_source))
    ]


def judge(sides, options):
    """Return the report as a dict; the Sides are under "sides".

    Raise UserError if the runs cannot be compared at all. A claim that cannot be judged is stated
    in the report."""
    declared = declaration([run for side in sides for run in side.runs])
    for side in sides:
        side.declared = declared
        check_one_experiment(side)
        check_complete(side)
        check_none_diverged(side)
        for run in side.runs:
            require(
                not run.contradiction,
                f"{list_names([run])} contradicts itself: {run.contradiction}; restore the log that"
                " the run wrote",
            )
        add_warnings(side)
    *ideas, base = sides
    for idea in ideas:
        check_comparable(idea, base)
    a = sides[0]
    alpha = options.alpha or declared.get("alpha", ALPHA)
    declares = declared.get("alpha", alpha)
    others = [f"alpha {alpha:g}, and race.jsonl declares {declares:g}"] * (alpha != declares)
    stated = {logs.target_of(run) for side in sides for run in side.runs} - {None, options.target}
    if options.target is not None and stated:
        others.append(
            f"target {options.target:g}, and the logs state"
            f" {' and '.join(map('{:g}'.format, sorted(stated)))}"
        )
    report = {
        "alpha": alpha,
        "others": others,
        "verdicts": verdicts([(idea, base) for idea in ideas], options.rate),
        "stop": None,
        "loss": {**dict.fromkeys(("target", "interval", "p", "significant")), **summary(a.losses)},
        "comparison": None,
        "time": (
            None
            if a.untimed or len({run.card for run in a.runs} - {None}) > 1
            else summary(a.seconds)
        ),
    }
    if len(sides) > 2:  # several ideas: the facts are those of the base
        report |= {
            "verdict": NO_CLAIM,
            "reason": "several ideas",
            "loss": report["loss"] | summary(base.losses),
        }
        report["time"] = None if base.untimed else summary(base.seconds)
    try:
        if len(sides) < 3:
            report |= judge_claim(sides, *report["verdicts"] or [None], alpha, options.target)
    except Undecided:
        raise
    except UserError as reason:
        report |= {"verdict": UNJUDGED, "reason": str(reason)}
    return report | {
        "warnings": list(dict.fromkeys(warning for side in sides for warning in side.warnings)),
        **list_runs(sides),
        "sides": sides,
    }


def judge_claim(sides, verdict, alpha, target):
    """Return the record's claim as a part of the report. Raise UserError where its tests are
    undefined."""
    declared = sides[0].declared
    a = sides[0]
    target = choose_target(a.runs, target)
    if target is None:
        return {
            "verdict": NO_CLAIM,
            "reason": "the runs had no target loss; stats.py --target X judges them by one",
        }
    loss = judge_loss(a.losses, target, alpha)
    comparison = None
    if len(sides) == 2:
        check_timed(*sides)
        comparison = compare_times(sides, verdict, alpha)
    stop = judge_looks(sides, loss["target"], alpha) if declared.get("until_decided") else None
    below = loss["p"] < alpha
    faster = comparison is None or comparison["p"] < alpha
    if stop:
        below = stop["passed"][0] is not None
        faster = stop["passed"][-1] is not None
        if len(a.runs) > stop["n"]:
            a.warnings.append(
                f"the race was decided after {stop['n']} runs and continued to {len(a.runs)}; the "
                "decision stands"
            )
    doubt = (
        f", but p = {loss['p_bootstrap']:.3g} by a bootstrap-t"
        if below and (loss["p_bootstrap"] or 0) > alpha
        else ""
    )
    reasons = [
        f"mean loss {'' if below else 'not significantly '}< {loss['target']:g} (p ="
        f" {loss['p']:.4g}{doubt})"
    ]
    if comparison:
        comparison["significant"] = faster
        by = " by the paired test of log time" if declared.get("test") == "paired" else ""
        reasons.append(
            f"{'' if faster else 'not significantly '}faster{by} (p = {comparison['p']:.4g})"
        )
    reasons.append(
        f"at alpha {alpha:g}"
        if not stop
        else (
            f"decided for {stop['outcome']} after {stop['n']} of at most "
            f"{stop['most']} runs, at alpha {alpha:g} over all looks"
        )
    )
    return {
        "verdict": HOLDS if below and faster else FAILS,
        "reason": ", ".join(reasons),
        "loss": {**loss, "significant": below},
        "comparison": comparison,
        "stop": stop,
    }


def judge_looks(sides, target, alpha):
    """Evaluate the looks of a race that runs until it is decided. Raise Undecided if it is still
    open."""
    a = sides[0]
    declared = sides[0].declared
    require(
        alpha == declared["alpha"],
        f"the race declared to run until it is decided at alpha {declared['alpha']:g}, "
        f"not {alpha:g}; use --alpha {declared['alpha']:g}",
    )
    ours, *_ = sides = in_turn(*sides)
    tests = [lambda look: one_sample_t_less(ours.losses[:look], target)]
    if len(sides) == 2:
        less = paired_t_less if declared["test"] == "paired" else welch_t_less
        tests.append(lambda look: less(*(np.log(side.seconds[:look]) for side in sides)))
    stop = evaluate_looks(
        tests, len(pair_up(*sides) or ()), declared["n"], alpha, ours.losses, target
    )
    if stop is None:
        raise Undecided(
            f"the race runs until it is decided, and after {len(a.runs)} of at most "
            f"{plural(declared['n'], 'run')} it is not; resume it with race.py --resume"
        )
    return stop


def check_timed(a, b):
    """Raise UserError unless every run of two Sides states the time of the whole run."""
    for odd, seen in (
        (a.untimed + b.untimed, "no train_time above zero on the last validation line of {}"),
        (
            a.clock_reset + b.clock_reset,
            "the clock was reset during training ({}), so times do not compare",
        ),
    ):
        require(
            not odd,
            f"{seen.format(list_names(odd))}; without a second set the loss alone can be judged",
        )


def check_comparable(a, b):
    """Raise Mixed if two sets differ in a fact, else UserError if a run is in both. Runs of one
    race ran on one machine."""
    for what, key in FACTS.items():
        unknown = None if a.declared or what not in [*FACTS][:2] else "unknown"
        found = [
            {
                str(value)
                for run in side.runs
                if (value := unknown if key(run) is None else key(run)) is not None
            }
            for side in (a, b)
        ]
        if all(found) and len(found[0] | found[1]) > 1:
            raise Mixed(
                f"the sets hold runs {what}"
                f" ({' against '.join(' and '.join(sorted(values)) for values in found)})",
                "compare runs of the same machine, data and target",
            )
    paths = {os.path.realpath(run.path) for run in a.runs}
    shared = [run for run in b.runs if os.path.realpath(run.path) in paths] or logs.without_copies(
        a.runs + b.runs
    )[1]
    require(
        not shared,
        f"{logs.printable(shared[0].path) if shared else ''} is in both sets; a run belongs to one",
    )
    if not any(run.card for run in a.runs + b.runs):
        a.warnings.append(
            "the logs do not state their GPUs: times compare only if all ran on the same machine"
        )


def in_turn(*sides):
    """Return the Sides with their runs in the order of the race, if all runs have pairs."""
    pairs = pair_up(*sides)
    return (
        [replace(side, runs=list(runs)) for side, runs in zip(sides, zip(*pairs))]
        if pairs
        else list(sides)
    )


# Output


def show_mean(found, unit="s"):
    spread = "" if found["sd"] is None else f" ± {found['sd']:.4f}"
    return f"{found['mean']:.4f}{spread} {unit}"


def list_runs(sides):
    """Return the runs of Sides and what was left out, ready for json.dumps."""
    runs = [
        {
            "set": side.name,
            "path": run.path,
            "index_in_file": run.index_in_file,
            "val_loss": run.final_loss,
            "train_time_ms": run.train_time_ms,
            "source_sha256": run.source_sha256,
            "gpus": run.gpus,
        }
        for side in sides
        for run in side.runs
    ]
    left_out = dict.fromkeys(item for side in sides for item in side.left_out)
    return {
        "runs": runs,
        "left_out": [{"path": path, "reason": reason} for path, reason in left_out],
    }


def plot(sides, found, path):
    """Plot what the Verdicts (found) answer, the pairs of runs, and the sides' losses over time."""
    import picture

    target = None
    with contextlib.suppress(UserError):  # several targets
        target = choose_target(sides[0].runs, None)
    titles = [f"{one.name} {one.sentence}" for one in ranked(found)[:MOST_TITLES]]
    if len(found) > MOST_TITLES:
        titles.append(f"and {plural(len(found) - MOST_TITLES, 'idea')} below")
    for side in sides if not found else ():
        times = "" if side.untimed else f", {show_mean(summary(side.seconds))}"
        loss = show_mean(summary(side.losses), "nats per token")
        titles.append(f"{side.label}: {loss}{times} (mean ± sd, n = {len(side.runs)})")
    picture.draw_sides(titles, sides, ranked(found), target, path)


def plan(options):
    """Return the number of runs that a claim needs, as a dict for --json. UserError unless sd and
    margin are above 0."""
    sd = options.sd
    margin = options.margin
    require(
        all(value and 0 < value < math.inf for value in (sd, margin)),
        f"a plan needs sd and margin above 0, and they are {sd} and {margin}; give --sd and"
        " --margin",
    )
    needed = []
    for claim, sets in ("mean below a target", 1), ("less than another set", 2):
        runs = runs_needed(sd, margin, options.alpha, options.power, sets)
        needed.append(
            {
                "claim": claim,
                "sets": sets,
                "runs": runs,
                "power": power(runs, sd, margin, options.alpha, sets),
            }
        )
    return {
        "sd": sd,
        "margin": margin,
        "alpha": options.alpha,
        "power": options.power,
        "needed": needed,
    }


def parse(arguments):
    parser = argparse.ArgumentParser(
        description="Judge a record's claim from its run logs.",
        allow_abbrev=False,
        epilog="Exit status: 0 an idea is better or the claim holds, 1 neither, 2 not judged.",
    )
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        metavar="PATH",
        type=logs.or_latest(logs.RACE),
        help="logs or folders of logs; or latest, the last race",
    )
    add("--vs", nargs="+", metavar="PATH", help="logs of the version to beat")
    add(
        "--side",
        help="of the paths' race, the letter of the idea to judge against the base (default: a, the"
        " first)",
    )
    add(
        "--target",
        type=float,
        help=f"target loss (default: what the logs state, else {DEFAULT_TARGET})",
    )
    add(
        "--alpha",
        type=float,
        help=f"level of every test (default: what the race declared, else {ALPHA})",
    )
    add(
        "--rate",
        type=float,
        metavar="NATS",
        help="nats that the base loses per unit of ln(time), for runs without a short base",
    )
    add(
        "--source",
        metavar="HASH",
        help="judge only runs whose source has a SHA-256 with this beginning",
    )
    add("--vs-source", metavar="HASH", help="the same for --vs")
    add("--plan", action="store_true", help="print how many runs are needed, and judge nothing")
    add("--sd", type=float, help="for --plan: standard deviation of a run")
    add("--margin", type=float, help="for --plan: true difference from the target or the other set")
    add(
        "--power",
        type=float,
        default=0.9,
        help="for --plan: probability of showing it (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one line of JSON instead")
    options = parser.parse_args(arguments)
    if options.plan and options.alpha is None:
        options.alpha = ALPHA
    for name, holds, wanted in (
        ("alpha", lambda x: 0 < x < 0.5, "number between 0 and 0.5"),
        ("power", lambda x: 0 < x < 1, "number between 0 and 1"),
        ("target", math.isfinite, "finite number"),
        ("rate", lambda x: 0 < x < math.inf, "number above 0"),
    ):
        if (given := getattr(options, name)) is not None and not holds(given):
            parser.error(f"--{name} is {given}; give a {wanted}")
    if options.side and options.vs:
        parser.error("--side takes both sets from PATH; leave out --vs")
    given = [
        f"--{name}"
        for name in (("vs", "side") if options.plan else ("sd", "margin"))
        if getattr(options, name)
    ]
    if given or options.plan and options.paths:
        parser.error(
            f"--plan reads no logs; leave out {', '.join(given or options.paths)}"
            if options.plan
            else f"{', '.join(given)} needs --plan; add it"
        )
    if not options.paths and not options.plan:
        parser.error("no PATH was given; name logs, or a folder of logs")
    return options


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.plan:
            found = plan(options)
            fewest = min(found["needed"], key=lambda each: each["runs"])
            most = math.ceil(LONGER * fewest["runs"]) + 1  # one more for the bootstrap's veto
            print(
                logs.show_json(found)
                if options.json
                else pages.show("plan.txt.jinja", **found, most=most, fewest=fewest)
            )
            return 0
        found = give(options)
    except UserError as reason:
        print(brief(f"The claim cannot be judged: {reason}."), file=sys.stderr)
        found = logs.not_judged(reason)
    if options.json:
        print(logs.show_json(found))
    return found["status"]


def give(options):
    """Judge what options name, print it unless --json is among them, and return the answer() with
    the report's figures."""
    sides = []
    try:
        sides = choose_sides(options)
        report = judge(sides, options)
    except UserError as reason:
        if sides and not options.json:
            print(pages.show("runs.txt.jinja", sides=sides, most=MOST_SHOWN), flush=True)
        print(brief(f"The claim cannot be judged: {reason}."), file=sys.stderr)
        return {**logs.not_judged(reason), "claim": None, "warnings": [], **list_runs(sides)}
    claim = report["verdict"]
    reason = report["reason"]
    if report["others"] and claim == HOLDS:
        report["verdict"] = claim = OTHER
        reason = f"{OTHER}: {'; '.join(report['others'])}"
    looked = sides[0].declared.get("until_decided")
    found = answer(sides, report["verdicts"], claim, reason, looked)
    if not options.json:
        unjudged = claim == UNJUDGED and found["status"] == 2
        print(
            pages.show(
                "stats.txt.jinja",
                report=report,
                show_mean=show_mean,
                show_verdicts=show_verdicts,
                unjudged=unjudged,
                last=last_line(found) if report["verdicts"] else "",
            ),
            flush=True,
        )
        if unjudged:
            print(brief(f"The claim cannot be judged: {reason}."), file=sys.stderr)
    return {
        **found,
        "claim": (
            None
            if claim == NO_CLAIM
            else {
                "verdict": claim.removeprefix("the "),
                **{
                    name: report[name]
                    for name in ("reason", "alpha", "others", "loss", "time", "comparison", "stop")
                },
            }
        ),
        **{name: report[name] for name in ("warnings", "runs", "left_out")},
    }


if __name__ == "__main__":
    logs.run_main(main)
