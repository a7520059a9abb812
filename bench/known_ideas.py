"""Race ideas whose effect on a GPT-2-small on FineWeb is public: which does a preset tell right?

    .venv/bin/python bench/known_ideas.py                                the preset bench
    .venv/bin/python bench/known_ideas.py --preset laptop -n 5
    .venv/bin/python bench/known_ideas.py --only "no rotary" -- --num_steps 1000     flags for all
    .venv/bin/python bench/known_ideas.py --apply "partial key offset"   edit train_gpt.py, for a
                                                    race of your own: ./run.sh -n 3 --vs HEAD

Each idea is an edit of train_gpt.py that takes a part of record 44 away, or adds what a later
record added. All are branches of a temporary clone of the last commit and run in one race, so one
base serves all; its folder is moved to logs/. A record that is named often changed several things
at once; that it stays in all later records is what makes an idea known. An idea is right if its own
p, without a correction for the number of ideas, is below 0.05 and its sign is the public one; wrong
if the sign is another. There are two verdicts: by the time to the base's loss, and by the loss
after as many steps, since a step that is slow on a CPU may cost a GPU nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, machine, positive, table

LEVEL = 0.05
SCRIPT = "train_gpt.py"
ANCHOR = "# Titles of --help."  # stands after PRESETS


@dataclass
class Idea:
    """An edit: texts of train_gpt.py with their replacements. public: better or worse at full
    size; source: the record of the public history that shows it."""

    name: str
    public: str
    source: str
    edits: tuple[tuple[str, str], ...]


def values(text: str) -> tuple[tuple[str, str], ...]:
    """Return the edit that gives a config c of every preset other values, as keywords."""
    line = f"PRESETS = {{name: replace(c, {text}) for name, c in PRESETS.items()}}"
    return ((ANCHOR, f"{line}\n\n{ANCHOR}"),)


ADAM_FOR_MATRICES = "".join(
    f"AdamGroup({kind!r}, lr_mul=0.003 / c.adam_lr, beta1=0.9), "
    for kind in ("attn", "mlp_fc", "mlp_proj")
)
KEY_OFFSET = """
        if self.layer.window == "L":
            fixed, moved = k.chunk(2, dim=2)
            k = torch.cat([fixed, torch.cat([moved[:1], moved[:-1]])], dim=2)"""
ROTATED = "rotate(norm(qk), cos[:tokens, None], sin[:tokens, None])"
HEADS = f"q, k = {ROTATED}.chunk(2, dim=1)"
SCALED = """        update = update * v.clamp_min(1e-10).rsqrt()
        update = update * (norm / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
"""

IDEAS = (
    Idea("no rotary", "worse", "2", ((ROTATED, "norm(qk)"),)),
    Idea("no QK norm", "worse", "5", ((ROTATED, ROTATED.replace("norm(qk)", "qk")),)),
    Idea("GELU for ReLU squared", "worse", "5", (("F.linear(h.relu() * h", "F.linear(F.gelu(h)"),)),
    Idea(
        "Adam for the matrices",
        "worse",
        "3",
        values(f"param_groups=({ADAM_FOR_MATRICES}*c.param_groups)"),
    ),
    Idea("Muon for NorMuon", "worse", "41", ((SCALED, ""),)),
    Idea(
        "no value tables",
        "worse",
        "14",
        values('layers=re.sub(r"(?<=[SL])[0-9]", "", c.layers)'),
    ),
    Idea("no skip connections", "worse", "11", values('layers=re.sub(r"[+][0-9]+", "", c.layers)')),
    Idea("no shortcut of x0", "worse", "9", (("mix[1] * context.x0", "0 * mix[1] * context.x0"),)),
    Idea(
        "short windows alone",
        "worse",
        "12",
        values("final_window=1, stages=tuple(replace(s, long_window=1) for s in c.stages)"),
    ),
    Idea(
        "twice the learning rates",
        "worse",
        "44",
        values("muon_lr=c.muon_lr * 2, adam_lr=c.adam_lr * 2"),
    ),
    Idea(
        "a table of bigrams",
        "better",
        "62",
        values("ngrams=(Ngrams(2, 131072, c.model_dim), *c.ngrams), lazy_tables=True"),
    ),
    Idea("partial key offset", "better", "49", ((HEADS, HEADS + KEY_OFFSET),)),
    Idea(
        "asymmetric logits",
        "better",
        "54",
        (("Softcap(config.logit_cap)", "Softcap(23.0, 5.0)"),),
    ),
)


def git(folder: Path, *words: str) -> None:
    settings = "user.name=known ideas", "user.email=known@ideas", "commit.gpgsign=no"
    own = [word for one in (*settings, "advice.detachedHead=no") for word in ("-c", one)]
    # without a git hook's variables, which name its repository
    environment = {
        name: v for name, v in os.environ.items() if not re.match("GIT_(?!CONFIG)", name)
    }
    if subprocess.run(["git", *own, *words], cwd=folder, env=environment).returncode:
        raise SystemExit(f"git {' '.join(words)} failed, see above")


def branch_of(idea: Idea) -> str:
    return idea.name.replace(" ", "-")


def edited(source: str, idea: Idea) -> str:
    for old, new in idea.edits:
        if source.count(old) != 1:
            raise SystemExit(f"{idea.name}: {old!r} stands {source.count(old)} times in {SCRIPT}")
        source = source.replace(old, new)
    return source


def commit(clone: Path, idea: Idea) -> None:
    """Commit an idea's edit as a branch of the clone, and return to the base."""
    path = clone / SCRIPT
    source = edited(path.read_text(encoding="utf-8"), idea)
    git(clone, "checkout", "--quiet", "-b", branch_of(idea))
    path.write_text(source, encoding="utf-8")
    git(clone, "commit", "--quiet", "--all", "--no-verify", "-m", idea.name)
    git(clone, "checkout", "--quiet", "base")


def race(ideas: list[Idea], ranks: int, n: int, flags: list[str]) -> dict:
    """Race the ideas in a clone. Return the race's answer; its folder is in logs/."""
    with tempfile.TemporaryDirectory() as home:
        clone = Path(home) / "clone"
        git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(clone))
        git(clone, "checkout", "--quiet", "-b", "base")
        for idea in ideas:
            commit(clone, idea)
        for folder in (ROOT / "data").iterdir():
            if folder.is_dir() and not (clone / "data" / folder.name).exists():
                (clone / "data" / folder.name).symlink_to(folder)
        versions = [f"--vs={branch_of(idea)}" for idea in ideas]
        words = [sys.executable, "launch/race.py", f"-n={n}", f"--ranks={ranks}", "--json"]
        process = subprocess.Popen(
            [*words, *versions, "--vs=base", "--", *flags],
            cwd=clone,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = ""
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", file=sys.stderr, flush=True)
            process.wait()
        finally:
            process.terminate()
            for folder in (clone / "logs").glob("race-*"):
                shutil.move(folder, ROOT / "logs" / folder.name)
        if not line.startswith("{"):
            raise SystemExit("the race wrote no answer, see above; its runs are in logs/")
        return json.loads(line)


def verdict_of(idea: Idea, better: bool, shown: bool) -> str:
    if not shown:
        return "undecided"
    return "right" if better == (idea.public == "better") else "wrong"


def row(idea: Idea, found: dict) -> list[str]:
    """Return a line of the table; its last two cells are the verdicts by time and by loss."""
    answer = found["to_same_loss"]
    loss = found["loss"]
    cells = [idea.name, idea.source, idea.public]
    if not answer:
        return [*cells, "-", "-", "-", "undecided", "undecided"]
    ratio = f"{answer['ratio']:.3f} ({answer['low']:.3f} to {answer['high']:.3f}), {answer['how']}"
    shown = f"{loss['difference']:+.4f}"
    by_loss = False
    if loss["low"] is not None:  # None: all pairs differ by the same amount
        shown += f" ({loss['low']:+.4f} to {loss['high']:+.4f})"
        by_loss = loss["low"] * loss["high"] > 0
    return [
        *cells,
        shown,
        ratio,
        f"{answer['p']:.2g}",
        verdict_of(idea, answer["ratio"] < 1, answer["p"] < LEVEL),
        verdict_of(idea, loss["difference"] < 0, by_loss),
    ]


def score(verdicts: list[str]) -> str:
    words = ("right", "undecided", "wrong")
    return ", ".join(f"{verdicts.count(word)} {word}" for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="bench")
    parser.add_argument("-n", type=positive, default=3, help="runs of each idea and of the base")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--only", action="append", help="a name; repeatable", metavar="IDEA")
    parser.add_argument("--apply", metavar="IDEA", help="edit train_gpt.py here, and race nothing")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for all sides")
    options = parser.parse_args()
    names = [idea.name for idea in IDEAS]
    named = [options.apply] if options.apply else options.only or []
    unknown = {*named} - {*names}
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    ideas = [idea for idea in IDEAS if not named or idea.name in named]
    if options.apply:
        path = ROOT / SCRIPT
        path.write_text(edited(path.read_text(encoding="utf-8"), ideas[0]), encoding="utf-8")
        print(f"{SCRIPT}: {options.apply}, of record {ideas[0].source}; see git diff")
        return 0
    found = race(ideas, options.ranks, options.n, ["--preset", options.preset, *options.flags])
    answers = {one["name"]: one for one in found["ideas"]}
    lines = [row(idea, answers[branch_of(idea)]) for idea in ideas if branch_of(idea) in answers]
    if not lines:
        raise SystemExit(f"nothing was judged: {found['reason']}")
    head = "idea|record|public|loss, nats|time to the base's loss|p|by time|by loss".split("|")
    print(table(head, lines))
    *_, by_time, by_loss = map(list, zip(*lines))
    print(f"\n{' '.join([options.preset, *options.flags])}, n = {options.n}, {len(lines)} ideas")
    print(f"by time: {score(by_time)}; by loss: {score(by_loss)}")
    print(f"race: {Path(found['folder']).name}; {machine()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
