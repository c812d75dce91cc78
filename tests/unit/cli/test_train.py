"""The command line, run as a person runs it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import gradaccum as ga
from gradaccum.cli.targets import resolve

TINY = ["--max-length", "24", "--effective-batch", "8", "--micro-batch-tokens", "96"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gradaccum", *map(str, arguments)]


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own."""
    return subprocess.run(
        command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("runs") / "first"
    done = process("train", "gpt", "--data", text, *TINY, "--steps", 9, "--seed", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_time(out: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(out)]


def test_a_run_folder_is_complete(run):
    out, _ = run
    assert {path.name for path in out.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "model",
        "result.json",
        "sample.txt",
    }
    reports = lines(out)
    assert [report["optimizer_step"] for report in reports] == list(range(1, 10))
    assert all(report["outcome"] == "stepped" for report in reports)
    assert (
        sum(report["samples"] for report in reports)
        == (json.loads((out / "result.json").read_text())["counters"]["samples"])
    )
    assert all(0 <= report["padding"] < 0.5 for report in reports)
    assert all(report["padded_tokens"] <= 96 * report["micro_batches"] for report in reports)


def test_held_out_loss_falls_and_is_printed_beside_its_baseline(run):
    out, done = run
    result = json.loads((out / "result.json").read_text())
    assert result["held_out_loss"]["last"] < result["held_out_loss"]["first"]
    assert f"held-out loss {result['held_out_loss']['last']:.4f}" in done.stdout
    assert f"unigram entropy {result['baseline']['unigram entropy']:.4f}" in done.stdout


def test_transformers_loads_model_and_tokenizer(run):
    out, _ = run
    assert (out / "model" / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = torch.tensor([tokenizer("the cut of a batch")["input_ids"]])
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_its_config_repeats_a_run_bit_for_bit(gradaccum, run, tmp_path):
    out, _ = run
    again = tmp_path / "again"
    assert gradaccum("train", out / "config.toml", "--out", again).returncode == 0
    assert without_time(again) == without_time(out)
    weights = [folder / "model" / "model.safetensors" for folder in (out, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_command_line_wins_over_the_file(gradaccum, run, tmp_path):
    out, _ = run
    other = tmp_path / "other"
    arguments = ["--steps", 2, "--micro-batch-size", 3, "--seed", 4, "--out", other]
    assert gradaccum("train", out / "config.toml", *arguments).returncode == 0
    config = tomllib.loads((other / "config.toml").read_text())
    assert (config["steps"], config["micro_batch_size"], config["seed"]) == (2, 3, 4)
    assert "micro_batch_tokens" not in config
    assert [line["micro_batches"] for line in lines(other)] == [3, 3]


def test_the_micro_batch_does_not_change_the_update(gradaccum, run, tmp_path):
    out, _ = run
    other = tmp_path / "other"
    done = gradaccum("train", out / "config.toml", "--micro-batch-size", 8, "--out", other)
    assert done.returncode == 0, done.stderr
    for one, two in zip(lines(out), lines(other), strict=True):
        assert one["micro_batches"] != two["micro_batches"]
        for name in ("loss", "grad_norm", "lr", "weight", "samples", "tokens"):
            assert one[name] == pytest.approx(two[name], rel=2e-4), name


def test_a_trained_model_can_be_trained_further(gradaccum, run, text, tmp_path):
    out, _ = run
    done = gradaccum(
        "train", "gpt", "--data", text, "--model", out / "model", *TINY, "--epochs", 1,
        "--out", tmp_path / "further",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "further" / "result.json").read_text())["held_out_loss"]["first"]
    assert first == pytest.approx(
        json.loads((out / "result.json").read_text())["held_out_loss"]["last"], abs=0.5
    )


def test_bert_is_weighed_by_masked_tokens(gradaccum, text, tmp_path):
    out = tmp_path / "bert"
    done = gradaccum("train", "bert", "--data", text, *TINY, "--steps", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    weights = [line["weight"] for line in lines(out)]
    assert all(
        0 < weight < line["tokens"] / 2 for weight, line in zip(weights, lines(out), strict=True)
    )
    assert len(set(weights)) > 1, "the number of masked tokens varies"
    AutoModelForMaskedLM.from_pretrained(out / "model")


def test_ctrl_c_saves_what_was_learnt(text, tmp_path):
    out = tmp_path / "stopped"
    arguments = ["train", "gpt", "--data", text, *TINY, "--steps", 100_000, "--out", out]
    with subprocess.Popen(
        command(*arguments), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as running:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "saving" in printed
    done = json.loads((out / "result.json").read_text())["counters"]["optimizer_steps"]
    assert done == len(lines(out)) < 100_000
    assert json.loads((out / "result.json").read_text())["stopped"] is True
    AutoModelForCausalLM.from_pretrained(out / "model")


def test_a_second_ctrl_c_ends_it_at_once(gradaccum, tmp_path, monkeypatch):
    """The second comes while the step runs that was to be the last."""
    (tmp_path / "twice.py").write_text(
        FACTORY.replace("def loss(model, micro):", "def loss(model, micro):\n        interrupt()")
        + INTERRUPTS
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 8, "--micro-batch-size", 8, "--epochs", 1, "--out", "out"]
    done = gradaccum("train", "twice:build", *arguments)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.toml", "metrics.jsonl"}


BAD = {
    "unknown recipe": (["gtp"], "Did you mean 'gpt'?"),
    "no such file": (["gpt", "--data", "nowhere.txt"], "nowhere.txt"),
    "empty file": (["gpt", "--data", "empty.txt"], "empty.txt"),
    "not text": (["gpt", "--data", "binary.txt"], "binary.txt"),
    "broken line": (["gpt", "--data", "broken.jsonl"], "line 2"),
    "too little": (["gpt", "--data", "short.txt"], "at least 10 samples"),
    "no such device": (["gpt", "--data", "words.txt", "--device", "cuda:9"], "device"),
    "two ways to update": (
        ["gpt", "--dtype", "bfloat16", "--master-weights", "--stochastic-rounding"],
        "only one of master_weights, stochastic_rounding",
    ),
    "two sizes": (["gpt", "--micro-batch-size", "2", "--micro-batch-tokens", "9"], "only one of"),
    "no budget": (["gpt", "--memory", "12 bananas"], "memory = '12 bananas': expected a positive"),
    "budget of nothing": (["gpt", "--memory", "0"], "memory = '0': expected a positive"),
    "too large a budget": (["gpt", "--data", "words.txt", "--memory", "900TiB"], "at most"),
    "too small a budget": (
        ["gpt", "--data", "words.txt", "--memory", "1MiB"],
        "for what a step holds whatever its size, got parameters",
    ),
    "too small for a sample": (
        ["gpt", "--data", "words.txt", "--memory", "14MiB", "--max-length", "512"],
        "with chunked loss + checkpointing. Truncate samples, or raise memory to",
    ),
    "zero": (["gpt", "--effective-batch", "0"], "effective_batch"),
    "steps that fall": (["gpt", "--effective-batch", "8,9:4,5:2"], "steps must rise"),
    "no such rule": (["gpt", "--lr-rule", "cubic"], "--lr-rule"),
    "sample too large": (
        ["gpt", "--data", "words.txt", "--max-length", "24", "--micro-batch-tokens", "9"],
        "at most 9 tokens",
    ),
    "unknown key": (["bad.toml"], "Did you mean 'effective_batch'?"),
    "not toml": (["broken.toml"], "broken.toml"),
    "no recipe": (["none.toml"], "recipe ="),
    "no such module": (["nowhere:build"], "nowhere"),
    "infinite norm": (["gpt", "--max-grad-norm", "inf"], "max_grad_norm"),
    "an emoji in words": (["nowhere:key:factory"], "nowhere:key:factory"),
    "no data named": (["gpt", "--data", ""], "no such file"),
    "no model": (["gpt", "--data", "words.txt", "--model", "./nowhere"], "nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error_and_leaves_nothing(
    gradaccum, name, text, tmp_path, monkeypatch
):
    arguments, expected = BAD[name]
    (tmp_path / "words.txt").write_text(text.read_text())
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "short.txt").write_text("only this")
    (tmp_path / "bad.toml").write_text('recipe = "gpt"\neffective_bacth = 8\n')
    (tmp_path / "broken.toml").write_text("recipe = \n")
    (tmp_path / "none.toml").write_text("steps = 3\n")
    (tmp_path / "mine.py").write_text(FACTORY)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    done = gradaccum("train", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("error") >= 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_is_repeated_from_any_folder(gradaccum, text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    arguments = ["--data", text.name, *TINY, "--steps", 1, "--out", tmp_path / "one"]
    assert gradaccum("train", "gpt", *arguments).returncode == 0
    monkeypatch.chdir(tmp_path)
    done = gradaccum("train", "one/config.toml", "--out", "two")
    assert done.returncode == 0, done.stderr
    assert without_time(tmp_path / "two") == without_time(tmp_path / "one")


def test_a_name_on_a_hub_stays_a_name():
    _, settings = resolve("gpt", {"model": "gpt2", "tokenizer": "org/words", "data": "*.txt"})
    assert (settings.model, settings.tokenizer) == ("gpt2", "org/words")
    assert settings.data == str(Path("*.txt").absolute())


def test_what_was_learnt_is_saved_if_the_loss_breaks(gradaccum, tmp_path, monkeypatch):
    broken = FACTORY.replace("randn(50, 3)", "randn(50, 3); x[30:40] = float('nan')")
    (tmp_path / "broken.py").write_text(broken)
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 2, "--micro-batch-size", 2, "--epochs", 1, "--out", "out"]
    done = gradaccum("train", "broken:build", *arguments)
    assert done.returncode == 2
    assert "expected a finite loss" in done.stderr
    counters = json.loads((tmp_path / "out" / "result.json").read_text())["counters"]
    assert counters["optimizer_steps"] == len(lines(tmp_path / "out"))


def test_a_folder_is_never_overwritten(gradaccum, run, text):
    out, _ = run
    before = without_time(out)
    done = gradaccum("train", "gpt", "--data", text, *TINY, "--out", out)
    assert done.returncode == 2
    assert "ever overwritten" in done.stderr
    assert without_time(out) == before


FACTORY = """
import torch
import gradaccum as ga
from gradaccum.recipes.recipe import Recipe, adamw

def build(settings):
    torch.manual_seed(settings.seed)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(50, 3)
    samples = list(zip(x, x.sum(1, keepdim=True)))
    def loss(model, micro):
        return ga.losses.mse_loss(model(micro[0]), micro[1])
    return Recipe(model=model, loss=loss, optimizer=adamw(model, settings),
                  train=samples[:40], held_out=samples[40:])

def wrong(settings):
    return None
"""


INTERRUPTS = """
import signal

def interrupt():
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # training is under way
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
"""


def test_the_model_outlives_a_text_that_cannot_be_shown(gradaccum, tmp_path, monkeypatch):
    factory = FACTORY.replace(
        "held_out=samples[40:]",
        "held_out=samples[40:], show=lambda: 'd[1:key:2] [red]x', save=lambda p: None",
    )
    (tmp_path / "shown.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 16, "--micro-batch-size", 5, "--steps", 1, "--out", "out"]
    done = gradaccum("train", "shown:build", *arguments)
    assert "d[1:key:2] [red]x" in done.stdout
    assert json.loads((tmp_path / "out" / "result.json").read_text())["stopped"] is False


def test_16_bit_parameters_and_what_updates_them(gradaccum, text, tmp_path):
    """At a learning rate that moves no bfloat16, the loss falls by copies, and at random."""
    told = ["--data", text, *TINY, "--dtype", "bfloat16", "--lr", 3e-5, "--steps", 8]
    fallen = {}
    for name in ("plain", "master-weights", "stochastic-rounding"):
        way = [] if name == "plain" else [f"--{name}"]
        out = tmp_path / name
        done = gradaccum("train", "gpt", *told, *way, "--scheduler", "constant", "--out", out)
        assert done.returncode == 0, done.stderr
        loss = json.loads((out / "result.json").read_text())["held_out_loss"]
        fallen[name] = loss["first"] - loss["last"]
    assert fallen["master-weights"] > fallen["plain"]
    assert fallen["stochastic-rounding"] > fallen["plain"]
    again = tmp_path / "again"
    config = tmp_path / "master-weights" / "config.toml"
    assert gradaccum("train", config, "--out", again).returncode == 0
    assert without_time(again) == without_time(tmp_path / "master-weights")


def test_a_size_that_changes_over_a_run_and_its_config(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "growing.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    rules, original = [], ga.effective_batches

    def noting(*args, **options):
        rules.append(options["lr_rule"])
        return original(*args, **options)

    monkeypatch.setattr(ga, "effective_batches", noting)
    told = ["--effective-batch", "4,2:8,4:16", "--lr-rule", "sqrt"]
    arguments = [*told, "--micro-batch-size", 5, "--epochs", 1, "--out", "out"]
    done = gradaccum("train", "growing:build", *arguments)
    assert done.returncode == 0, done.stderr
    assert "4 samples, 8 after 2 optimizer steps, 16 after 4 optimizer steps" in done.stdout
    assert [line["samples"] for line in lines(tmp_path / "out")] == [4, 4, 8, 8, 16]
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert (config["effective_batch"], config["lr_rule"]) == ("4,2:8,4:16", "sqrt")
    assert gradaccum("train", "out/config.toml", "--out", "again").returncode == 0
    assert without_time(tmp_path / "again") == without_time(tmp_path / "out")
    assert rules == ["sqrt", "sqrt"]


def test_held_out_samples_that_weigh_nothing_are_refused_before_training(
    gradaccum, tmp_path, monkeypatch
):
    factory = FACTORY.replace(
        "return ga.losses.mse_loss(model(micro[0]), micro[1])",
        "return ga.Loss(model(micro[0]).sum() * 0, 0)",
    )
    (tmp_path / "weightless.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 16, "--micro-batch-size", 5, "--steps", 1, "--out", "out"]
    done = gradaccum("train", "weightless:build", *arguments)
    assert done.returncode == 2
    assert "held-out samples with something to predict" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_at_first_loses_no_model(gradaccum, tmp_path, monkeypatch):
    factory = FACTORY.replace("randn(50, 3)", "randn(50, 3); x[45] = float('inf')").replace(
        "held_out=samples[40:]", "held_out=samples[40:], save=lambda p: None"
    )
    (tmp_path / "infinite.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 16, "--micro-batch-size", 5, "--steps", 1, "--out", "out"]
    assert gradaccum("train", "infinite:build", *arguments).returncode == 0
    assert (tmp_path / "out" / "model").exists()
    losses = json.loads((tmp_path / "out" / "result.json").read_text())["held_out_loss"]
    assert losses == {"first": None, "last": None}


def test_a_model_that_cannot_read_the_samples_is_refused(gradaccum, run, text, tmp_path):
    model = run[0] / "model"
    arguments = ["train", "gpt", "--data", text, "--model", model, "--out", tmp_path / "out"]
    done = gradaccum(*arguments, "--max-length", 25)
    assert done.returncode == 2
    assert "--max-length 24" in done.stderr
    larger = tmp_path / "larger"
    shutil.copytree(model, larger)
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["oneword", "another"])
    tokenizer.save_pretrained(larger)
    done = gradaccum(*arguments, "--max-length", 24, "--tokenizer", larger)
    assert done.returncode == 2
    assert "as the model embeds" in done.stderr


def test_a_factory_of_your_own(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    arguments = ["--effective-batch", 16, "--micro-batch-size", 5, "--epochs", 2, "--lr", "0.1"]
    done = gradaccum("train", "mine:build", *arguments, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert [line["samples"] for line in lines(tmp_path / "out")] == [16, 16, 8] * 2
    done = gradaccum("train", "mine:wrong", *arguments, "--out", "other")
    assert done.returncode == 2
    assert "Return Recipe(" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["train", "--help"], 0), (["--version"], 0), ([], 2)]
)
def test_help(gradaccum, arguments, code):
    done = gradaccum(*arguments)
    assert done.returncode == code
    assert "gradaccum" in (done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
