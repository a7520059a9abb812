"""Estimate how soon an idea reaches the base's loss: one ratio of times, with its interval and p.

A race has the runs of an idea and of its base on the same seeds, and the *short base*: the base at
nine tenths of its steps on the first seeds. With d, the difference of final losses, and rho, the
ratio of the times of a run,

    theta = ln(rho) + Rate.log_ratio(d)

is the logarithm of the time to the base's loss, relative to the base's time. The base's loss is
taken to fall with the time t as a power law, A t^-CURVATURE above a limit; what the short base
loses gives A. A pair of runs with one seed shares its noise, so d and A come from pairs, and their
errors are added seed by seed. The variances of this sum, of rho and of CURVATURE are added (delta
method), with Welch and Satterthwaite's degrees of freedom. tests/test_same_loss.py simulates
coverage, false wins and power.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy.stats

LEVEL = 0.05  # two-sided, of all ideas of a race together
POWER = 0.8
SHORT = 0.9  # steps of the short base, as a part of the base's
SHORT_SEEDS = 3
FAR = 2.0  # the largest reach at which intervals cover what they promise
# the exponent of the base's loss over time, and its standard deviation over bases
CURVATURE = 0.5
CURVATURE_SD = 0.25
MARGIN = 0.01  # of a confirming race: the part of the time that a higher loss may be worth
TRIM = 0.2  # of the ratios by turns, at each end
EQUAL = 1e-9  # a spread below this is a difference in rounding

BETTER, NOT_JUDGED, NO_DIFFERENCE, WORSE = "better", "not judged", "no difference", "worse"
SAME_WORK, BY_TURNS, FROM_RUNS = "same work", "by turns", "from runs"


@dataclass
class Rate:
    """What the base loses, in nats, in a run that is shorter by log_time = -ln(part of its steps).

    variance, df: of the mean `lost`; errors: {seed: its deviation}, None for a rate by hand."""

    lost: float
    log_time: float
    variance: float = 0.0
    df: float = math.inf
    errors: dict | None = None

    def log_ratio(self, difference, curvature=CURVATURE):
        """Return the change of ln(time to the base's loss) by a difference of final losses.

        Both ways the base's curve is read between its two lengths: a better idea would reach the
        base's loss before its end, as the base shifted by the gain; a worse one stands where the
        base stood earlier."""
        above_limit = self.lost / math.expm1(curvature * self.log_time)
        return math.copysign(math.log1p(abs(difference) / above_limit) / curvature, difference)

    @property
    def nats(self):
        """The loss that the base's last bit of time is worth, in nats per unit of ln(time)."""
        return CURVATURE * self.lost / math.expm1(CURVATURE * self.log_time)


def rate_by_hand(nats):
    """Return the Rate of a base that loses `nats` per unit of ln(time)."""
    short = 1e-3
    return Rate(nats * short, short)


@dataclass
class Speed:
    """The logarithm of the ratio of the times of a run, with its variance. how: one of SAME_WORK,
    BY_TURNS, FROM_RUNS; of FROM_RUNS the times are those of the runs."""

    how: str
    log_ratio: float = 0.0
    variance: float = 0.0
    df: float = math.inf


@dataclass
class Answer:
    """The time to the base's loss, relative to the base's: 0.96 is 4 % sooner.

    low, high: the 95 % interval; p: two-sided; holm: p with Holm's correction for the ideas of a
    race; error, df: of ln(ratio); reach: |d| over what the short base loses; shows: the smallest
    gain that so many runs show with probability POWER; how: see Speed."""

    ratio: float
    low: float
    high: float
    p: float
    error: float
    df: float
    reach: float | None
    rate: float
    how: str
    shows: float
    holm: float = 1.0

    @property
    def verdict(self):
        if self.holm >= LEVEL:
            return NO_DIFFERENCE
        return BETTER if self.ratio < 1 else WORSE


def exchange_rate(pairs, log_time):
    """Return the Rate of a base, or None if it is not above 0 with confidence.

    pairs: {seed: (loss of the base, of the short base)}; log_time: ln of the ratio of their steps.
    """
    lost = {seed: short - full for seed, (full, short) in pairs.items()}
    values = np.array([*lost.values()])
    n = len(values)
    if n < 2:
        return None
    mean = values.mean()
    variance = values.var(ddof=1) / n
    if mean <= scipy.stats.t.isf(LEVEL / 2, n - 1) * math.sqrt(variance):
        return None
    errors = {seed: loss - mean for seed, loss in lost.items()}
    return Rate(float(mean), log_time, float(variance), n - 1, errors)


def speed_by_turns(seconds, steps):
    """Return the Speed of two sides that stepped by turns, a trimmed mean of their log ratios.

    seconds [turns, 2]: of a step of the idea and of the base, weighted over all stages; steps: of
    their runs. The variance is Winsorized (Yuen, Biometrika 61, 1974)."""
    ratios = np.log(seconds[:, 0] / seconds[:, 1])
    n = len(ratios)
    cut = int(TRIM * n)
    spread = scipy.stats.mstats.winsorize(ratios, (TRIM, TRIM)).var(ddof=1)
    return Speed(
        BY_TURNS,
        float(scipy.stats.trim_mean(ratios, TRIM)) + math.log(steps[0] / steps[1]),
        float(spread / n / (1 - 2 * TRIM) ** 2),
        n - 2 * cut - 1,
    )


def interval_of(speed):
    """Return the 95 % interval of a Speed's ratio."""
    half = scipy.stats.t.isf(LEVEL / 2, speed.df) * math.sqrt(speed.variance)
    return math.exp(speed.log_ratio - half), math.exp(speed.log_ratio + half)


def freedom(parts):
    """Return Welch and Satterthwaite's degrees of freedom of a sum of independent parts.

    parts: (variance, degrees of freedom) of each."""
    spread = sum(part**2 / df for part, df in parts)
    return sum(part for part, _ in parts) ** 2 / spread if spread else math.inf


def part_of_pairs(values, rate, by_lost):
    """Return (variance, degrees of freedom) of the mean of pairs and of by_lost * rate.lost.

    values: {seed: value of its pair}. A pair and the short base of its seed share the base's run,
    so what a seed adds to both is one value of a sample. With fewer short bases than pairs the
    covariance comes out at 0.86 to 0.91 of its true size. A short base of other seeds is independent."""
    n = len(values)
    of_pairs = np.var([*values.values()], ddof=1) / n
    of_lost = by_lost**2 * rate.variance
    df = freedom([(of_pairs, n - 1), (of_lost, rate.df)])
    errors = rate.errors or {}
    m = len(errors)
    if not errors or errors.keys() - values.keys():
        return of_pairs + of_lost, df
    # an error of one of m seeds in a mean over n, with the variance that its own mean has
    weight = by_lost * math.sqrt(n * (n - 1) / (m * (m - 1)))
    both = [value + weight * errors.get(seed, 0) for seed, value in values.items()]
    return np.var(both, ddof=1) / n, min(n - 1, df)


def time_to_same_loss(idea, base, rate, speed, ideas=1):
    """Return the Answer of an idea, or None where runs show no spread.

    idea, base: {seed: (final loss, ln of the seconds)}, paired if their seeds agree, else two
    independent samples. ideas: of the race; `shows` is for the strictest of Holm's levels."""
    from_runs = speed.how == FROM_RUNS
    difference = mean_loss(idea) - mean_loss(base)
    theta = rate.log_ratio(difference) + speed.log_ratio
    by_loss = slope(rate.log_ratio, difference)
    by_lost = slope(lambda lost: replace(rate, lost=lost).log_ratio(difference), rate.lost)
    by_curvature = slope(lambda value: rate.log_ratio(difference, value), CURVATURE)

    def value(run):
        loss, log_seconds = run
        return by_loss * loss + (log_seconds if from_runs else 0)

    if min(len(idea), len(base)) < 2:
        return None
    values = [{seed: value(run) for seed, run in side.items()} for side in (idea, base)]
    if idea.keys() == base.keys():
        pairs = {seed: values[0][seed] - values[1][seed] for seed in idea}
        parts = [part_of_pairs(pairs, rate, by_lost)]
    else:
        parts = [(by_lost**2 * rate.variance, rate.df)]
        for side in values:
            parts.append((np.var([*side.values()], ddof=1) / len(side), len(side) - 1))
    if from_runs:
        seconds = [
            np.mean([log_seconds for _, log_seconds in side.values()]) for side in (idea, base)
        ]
        theta += seconds[0] - seconds[1]
    parts += [
        ((by_curvature * CURVATURE_SD) ** 2, math.inf),
        (speed.variance, speed.df),
    ]
    error = math.sqrt(sum(part for part, _ in parts))
    df = freedom(parts)
    if error <= EQUAL < abs(theta) and speed.how != SAME_WORK:
        return None
    t = scipy.stats.t
    p = 2 * t.sf(abs(theta) / error, df) if error > EQUAL else float(abs(theta) <= EQUAL)
    half = t.isf(LEVEL / 2, df) * error
    needed = (t.isf(LEVEL / 2 / ideas, df) + t.isf(1 - POWER, df)) * error
    return Answer(
        ratio=math.exp(theta),
        low=math.exp(theta - half),
        high=math.exp(theta + half),
        p=p,
        holm=p,
        error=error,
        df=df,
        reach=abs(difference) / rate.lost if rate.errors else None,
        rate=rate.nats,
        how=speed.how,
        shows=-math.expm1(-needed),
    )


def mean_loss(runs):
    return float(np.mean([loss for loss, _ in runs.values()]))


def slope(function, at):
    step = 1e-5 * max(abs(at), 1e-3)
    return (function(at + step) - function(at - step)) / (2 * step)


# A confirming race, and the same race elsewhere


def steps_to_same_loss(steps, difference, rate):
    """Return how many steps bring an idea to the base's loss. difference: after `steps`, nats."""
    return math.ceil(steps * math.exp(rate.log_ratio(difference)))


def confirms(answer, differences, rate, speed):
    """Return (whether a confirming race shows the gain again, why).

    answer: its Answer; differences [n]: of final losses, idea - base, nats; speed: with the times
    of the runs in it. The loss may be higher by what MARGIN of the time is worth."""
    margin = MARGIN * rate.nats
    p = scipy.stats.ttest_1samp(differences, margin, alternative="less").pvalue
    _, slowest = interval_of(speed)
    said = (
        f"loss {np.mean(differences):+.4f} nats (not above {margin:.4f}: p = {p:.2g}), in"
        f" {math.exp(speed.log_ratio):.3f} of the time"
    )
    # a gain of less than a step leaves the steps as they are
    no_slower = slowest < 1 or speed.how == SAME_WORK and slowest == 1
    shown = answer.verdict == BETTER and p < LEVEL and no_slower
    return bool(shown), said


def carries_over(here, there):
    """Return how an idea's Answer elsewhere compares with that of the first race: holds, grows,
    fades, turns or unknown."""
    verdicts = {here.verdict, there.verdict}
    if verdicts == {BETTER, WORSE}:
        return "turns"
    if verdicts == {WORSE}:
        return "holds"
    variance = here.error**2 + there.error**2
    change = math.log(there.ratio / here.ratio)
    if variance:
        df = freedom([(one.error**2, one.df) for one in (here, there)])
        if 2 * scipy.stats.t.sf(abs(change) / math.sqrt(variance), df) < LEVEL:
            return "grows" if change < 0 else "fades"
    return "holds" if verdicts == {BETTER} else "unknown"
