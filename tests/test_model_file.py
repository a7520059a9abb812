"""Tests of export.py --to safetensors: a plain model file is cut from a source, and its logits are
those of the model that the source builds. transformers and lm-eval are tested where installed."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import frontier
import train_gpt
from conftest import logits_of, plant
from train_gpt import PRESETS, Encoding, Ngrams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "records"))
import export  # noqa: E402
import export_model  # noqa: E402
import logs  # noqa: E402
import sample  # noqa: E402

pytest.importorskip("safetensors")
ROOT = Path(train_gpt.__file__).parent
BYTES = Encoding(257, 256)
SMALL = dict(model_dim=48, num_heads=2, window_block=4, val_len=256, compile="off")
TABLES = (Ngrams(2, 300, 48), Ngrams(3, 200, 16))


def module_at(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_text(program):
    return logs.source_in(ROOT, program)


def saved(folder, config, encoding=BYTES, program="train_gpt.py", source=None, engine=train_gpt):
    """Write a model with random weights, none 0, and a log -> (path of the log, the model)."""
    model = train_gpt.build_model(dataclasses.replace(config, dtype="float32"), encoding)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_((0.1 * torch.randn(param.shape, generator=random)).bfloat16())
    content = {
        "run_id": "run",
        "program": program,
        "config": engine.json_of(config),
        "step": config.num_steps,
        **encoding._asdict(),
        "state": {name: param.detach() for name, param in model.named_parameters()},
    }
    engine.save_file(folder / "run.pt", content)
    rule = "=" * 100
    lines = [
        (source or source_text(program)).removesuffix("\n"),
        *(rule, "a machine", rule),
        json.dumps({"run_id": "run", "preset": "toy", "seed": 0, "config": {}}),
        "step:1/1 train_time:100ms step_avg:100.00ms train_loss:3.0",
    ]
    (folder / "run.txt").write_text("\n".join([*lines, ""]))
    plan = engine.plan_of(config, config.num_steps)
    model.apply_schedule(plan)
    return folder / "run.txt", model.eval(), plan.windows


@pytest.fixture
def in_this_process(monkeypatch):
    """Exports run here: a process of their own would import torch first."""

    def call(command):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            for name in ("train_gpt", "frontier"):
                patch.delitem(sys.modules, name)
            # a second train_gpt in one process would take over the first one's operators
            first = torch.library.custom_op
            second = lambda name, **how: first(f"exported_{name}", **how)
            patch.setattr(torch.library, "custom_op", second)
            return export_model.main(command[-3:])

    monkeypatch.setattr(subprocess, "call", call)


def exported(path, folder):
    """Export, and load the plain model in this process. Nothing of training, of ranks, of GPUs may
    be in its file."""
    assert export.main([str(path), "--to", "safetensors", str(folder)]) == 0
    file = folder / "modeling_gpt_speedrun.py"
    text = file.read_text()
    assert "class GPT" in text and "import train_gpt" not in text
    for word in ("Optimizer", "all_reduce", "def backward", "import triton", "numpy", "c.ngrams"):
        assert word not in text, word
    return module_at(file, "plain").load()


def check_logits(plain, model, windows, encoding):
    """Compare sequences that the export did not: of two documents, and longer than a window."""
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, encoding.vocab_size, (2, 230), generator=random)
    tokens[:, 50:90] = tokens[:, :40]  # repeats, for DocCopy
    tokens[0, 0] = tokens[0, 150] = encoding.bos_id
    with torch.inference_mode():
        wanted = torch.stack([logits_of(model, row, windows) for row in tokens])
        got = plain(tokens)
    wanted = wanted[..., : encoding.vocab_size]
    assert wanted.std() > 0.01 and got.dtype == torch.float32
    assert (got - wanted).abs().max() <= 1e-6 * max(1, wanted.abs().max())


CASES = {
    "laptop": (dataclasses.replace(PRESETS["laptop"], ngrams=TABLES), BYTES),
    "bench": (PRESETS["bench"], BYTES),
    "speedrun": (
        dataclasses.replace(PRESETS["speedrun"], **SMALL),
        Encoding(train_gpt.GPT2_VOCAB, 50256),
    ),
    "frontier": (
        dataclasses.replace(frontier.PRESETS["frontier"], **SMALL, mlp_dim=96, ngrams=TABLES),
        BYTES,
    ),
}


@pytest.mark.parametrize("preset", CASES)
def test_a_plain_file_has_the_logits_of_each_preset(tmp_path, in_this_process, preset):
    config, encoding = CASES[preset]
    program = Path(sys.modules[type(config).__module__].__file__).name
    path, model, windows = saved(tmp_path, config, encoding, program)
    plain = exported(path, tmp_path / "out")
    check_logits(plain, model, windows, encoding)
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["tokenizer"] == ("gpt2" if preset == "speedrun" else "bytes")
    with pytest.raises(ValueError, match="give the last"):
        plain(torch.zeros(1, settings["max_position_embeddings"] + 1, dtype=torch.long))


# An idea: another module and function with a constant, the config read in a forward, a matrix that
# two layers share, a head tied to the embedding, and a rounding with its own backward
IDEA = (
    (
        "class Block(nn.Module):",
        """class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round(decimals=3)


HALF = 0.5


def halved(x):
    return HALF * x


class Gain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.near = {"a": (1.5, None)}
        self.gain = parameter(torch.ones(config.model_dim), "scalars")

    def forward(self, x):
        return x + halved(self.gain * Rounded.apply(x)) * self.near["a"][0] / self.config.head_dim


class Block(nn.Module):""",
    ),
    (
        "x = mix[0] * x + mix[1] * context.x0",
        "x = mix[0] * x + mix[1] * self.gain(context.x0)",
    ),
    (
        "self.mlp = MLP(config, 4 * config.model_dim) if layer.mlp else None",
        "self.mlp = MLP(config, 4 * config.model_dim) if layer.mlp else None;"
        " self.gain = Gain(config)",
    ),
    (
        "self.lm_head = Head(c, vocab, encoding.vocab_size)",
        "self.lm_head = Head(c, vocab, encoding.vocab_size);"
        " self.lm_head.weight = self.embed.weight; self.blocks[3].mlp = self.blocks[1].mlp;"
        " self.blocks[2].attn.qkvo = self.blocks[3].attn.qkvo",
    ),
)


def edited(folder, edits):
    """Return (source of train_gpt.py with edits, its module)."""
    source = source_text("train_gpt.py")
    for old, new in edits:
        source = plant(source, old, new)
    (folder / "edited.py").write_text(source)
    return source, module_at(folder / "edited.py", f"edited_{abs(hash(source))}")


def test_an_edited_script_is_cut_as_it_was_when_it_trained(tmp_path, in_this_process):
    source, engine = edited(tmp_path, IDEA)
    config = engine.PRESETS["bench"]
    path, model, windows = saved(tmp_path, config, source=source, engine=engine)
    plain = exported(path, tmp_path / "out")
    check_logits(plain, model, windows, BYTES)
    inner = plain.model
    assert "lm_head.weight" not in dict(inner.named_parameters())
    assert inner.lm_head.weight is inner.embed.weight


@pytest.mark.parametrize(
    "edit, wanted",
    [
        (("h = x @ self.fc\n", "h = x @ self.fc * float(np.sqrt(2.0))\n"), "the package numpy"),
        (("self.kernels = False", "self.kernels = False; self.act = lambda x: x"), "lambda"),
        (
            ("x = self.uncapped_logits(x)\n", "x = 2 * self.uncapped_logits(x)\n"),
            "lm_head.logits must compute",
        ),
    ],
    ids=["numpy", "lambda", "a loss of its own"],
)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path, in_this_process, capfd, edit, wanted):
    source = source_text("train_gpt.py")
    old, new = edit
    assert old in source
    source = source.replace(old, new, 1)
    if "act" in new:
        source = source.replace("h = x @ self.fc\n", "h = self.act(x @ self.fc)\n", 1)
    path, *_ = saved(tmp_path, PRESETS["bench"], source=source)
    assert export.main([str(path), "--to", "safetensors", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert wanted in said and said.startswith("export.py: error: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists() and {*os.listdir(tmp_path)} == {"run.pt", "run.txt"}


def test_wrong_paths_and_flags_are_refused(tmp_path, capsys):
    (tmp_path / "run.txt").write_text("no model beside it")
    (tmp_path / "there").mkdir()
    (tmp_path / "run.pt.txt").write_text("")
    (tmp_path / "x.pt").write_text("")
    log = str(tmp_path / "run.txt")
    for path, folder, wanted in (
        (log, "out", "no saved model"),
        (str(tmp_path / "none.pt"), "out", "No such file"),
        (str(tmp_path), "out", "no saved model"),
        (str(tmp_path / "x.pt"), "there", "is there already"),
        (str(tmp_path / "x.pt"), "none/out", "its parent is no folder"),
    ):
        assert export.main([path, "--to", "safetensors", str(tmp_path / folder)]) == 2
        said = capsys.readouterr().err
        assert wanted in said and said.count("\n") == 1, said
    for flags in ([log, "--to", "safetensors"], [log, "--to", "onnx"], ["--to", "csv"]):
        with pytest.raises(SystemExit):
            export.main(flags)
        assert "--to" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_on_an_own_text_is_exported_from_its_log(tmp_path, script):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {n} says é {n * n}\n" for n in range(3000)))

    def call(*words):
        done = script(*words)
        _, errors = done.communicate(timeout=600)
        assert done.returncode == 0, errors

    call(ROOT / "data/text.py", text, "--out", tmp_path / "data", "--encoding", "bytes")
    shards = {
        f"--{split}_files": tmp_path / f"data/data_{split}_*.bin" for split in ("train", "val")
    }
    flags = [word for pair in shards.items() for word in pair]
    flags += ["--num_steps", 3, "--warmup_steps", 0, "--ngrams", "Ngrams(2, 500, 64)"]
    flags += ["--log_dir", tmp_path, "--run_id", "own", "--compile", "off", "--val_tokens", 2048]
    call(ROOT / "train_gpt.py", "--preset", "laptop", *flags)
    plain = exported(tmp_path / "own.txt", tmp_path / "out")
    trained = sample.load_model(tmp_path / "own.pt")
    check_logits(plain, trained.model, trained.windows, BYTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a bytes model, and settings with which nothing asks a network."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("bytes")
    path, *_ = saved(place, CASES["laptop"][0])
    exported(path, place / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(place / "hf"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield place / "out"


IN_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
sys.path.insert(0, folder)
import modeling_gpt_speedrun
plain = modeling_gpt_speedrun.load()
tokens = torch.randint(0, 256, (2, 150), generator=torch.Generator().manual_seed(0))
tokens[:, 0] = 256
mask = torch.ones_like(tokens)
mask[0, :30] = 0
with torch.no_grad():
    assert torch.equal(model(tokens).logits, plain(tokens))
    padded = model(tokens, attention_mask=mask).logits
    assert torch.allclose(padded[0, 30:], plain(tokens[:1, 30:])[0], atol=1e-5)
    prompt = tokenizer("né", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[256, 110, 195, 169]]
    found = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    wanted = prompt["input_ids"][0].tolist()
    while len(wanted) < len(found):
        wanted.append(plain(torch.tensor([wanted]))[0, -1].argmax().item())
    assert found == wanted and len(found) > 4
    assert tokenizer.decode([256, 110, 195, 169], skip_special_tokens=True) == "né"
"""


def test_transformers_loads_it_and_generates(folder):
    done = subprocess.run(
        [sys.executable, "-c", IN_TRANSFORMERS, folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


TASK = """
task: two_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_scores_it_on_a_local_task(folder, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [
        {"text": text, "choices": [" one", "né"], "label": 0} for text in ("a b c", "one", "xyz\n")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    model = f"pretrained={folder},trust_remote_code=True,add_bos_token=True"
    command = f"-m lm_eval --model hf --model_args {model} --tasks two_choices --device cpu"
    done = subprocess.run(
        [sys.executable, *command.split(), "--include_path", tmp_path, "--output_path", "scores"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = (tmp_path / "scores").rglob("*.json")
    score = json.loads(path.read_text())["results"]["two_choices"]["acc,none"]
    plain = module_at(folder / "modeling_gpt_speedrun.py", "plain").load()

    def score_of(text, choice):
        begin = [256, *text.encode()]
        tokens = [*begin, *choice.encode()]
        with torch.no_grad():
            log_probs = plain(torch.tensor([tokens]))[0].log_softmax(-1)
        return sum(log_probs[i - 1, tokens[i]].item() for i in range(len(begin), len(tokens)))

    right = [
        score_of(row["text"], row["choices"][0]) > score_of(row["text"], row["choices"][1])
        for row in rows
    ]
    assert score == pytest.approx(sum(right) / len(right))
