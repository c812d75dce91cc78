"""``gradaccum plan``, and what training makes of a budget."""

import json
import re

import pytest
from matplotlib import image

SMALL = ["--max-length", "64", "--effective-batch", "16"]

FACTORY = """
import torch
import gradaccum as ga
from gradaccum.recipes.recipe import Recipe

def build(settings, looking=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    def loss(model, rows):
        total = model(rows).square().sum()
        return ga.Loss(total + (0.0 if not looking else 0.0 * total.item()), len(rows))
    return Recipe(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=list(torch.ones(40, 4)),
        held_out=list(torch.ones(4, 4)),
    )

def looking(settings):
    return build(settings, looking=True)

def text(settings):
    # Lengths that nobody told, two terms with weights of their own, a BatchNorm, a constant.
    torch.manual_seed(0)
    parts = {"embed": torch.nn.Embedding(9, 8), "norm": torch.nn.BatchNorm1d(8)}
    model = torch.nn.ModuleDict(parts)
    sizes = torch.arange(1.0, 9.0)
    def loss(model, micro):
        hidden = model["norm"](model["embed"](micro["input_ids"]).mean(1)) * sizes
        return {"a": ga.Loss(hidden.square().sum(), len(hidden)), "b": ga.Loss(hidden.sum(), 3)}
    ids = [torch.ones(1 + k % 7, dtype=torch.long) for k in range(30)]
    return Recipe(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=[{"input_ids": one} for one in ids],
        held_out=[{"input_ids": one} for one in ids[:4]],
        pad={"input_ids": 0},
        weigh=lambda sample: {"a": 1, "b": 0.1},
    )
"""


def test_a_plan_is_a_table_a_picture_and_json(gradaccum, text, tmp_path):
    out = tmp_path / "plan"
    done = gradaccum("plan", "gpt", "--data", text, *SMALL, "--memory", "300MiB", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"plan.json", "frontier.png"}
    plan = json.loads((out / "plan.json").read_text())
    assert plan["time"] == "seconds"
    assert sum(plan["parts"].values()) == pytest.approx(plan["chosen"]["peak"])
    assert plan["chosen"]["peak"] <= plan["budget"] == 300 * 2**20
    assert plan["chosen"] in plan["frontier"]
    levers = [tuple(point["levers"]) for point in plan["frontier"]]
    assert list(dict.fromkeys(levers)) == [
        (),
        ("chunked_loss",),
        ("chunked_loss", "checkpointing"),
    ]
    for part in ("parameters", "gradient sums", "optimizer state", "activations", "temporaries"):
        assert part in done.stdout
    assert plan["reason"] in done.stdout
    assert re.search(r"^ *> ", done.stdout, re.MULTILINE)
    assert min(image.imread(out / "frontier.png").shape[:2]) > 300


def test_a_device_that_is_not_here(gradaccum, text, tmp_path):
    out = tmp_path / "plan"
    options = ["--device", "cuda", "--memory", "24GiB", "--effective-batch", "32"]
    done = gradaccum("plan", "bert", "--data", text, "--max-length", 64, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    plan = json.loads((out / "plan.json").read_text())
    assert plan["time"] == "relative to the fastest"
    assert min(point["time"] for point in plan["frontier"]) == 1
    assert plan["chosen"]["levers"] == []
    assert any("parking" in point["levers"] for point in plan["frontier"])
    assert "There is no cuda here" in done.stdout


def test_a_factory_of_ones_own(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "planned_mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    done = gradaccum("plan", "planned_mine:build", "--effective-batch", 20, "--memory", "16KiB")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "plans").iterdir()
    plan = json.loads((folder / "plan.json").read_text())
    assert 1 <= plan["caps"]["1"] < 20
    assert plan["chosen"]["micro_batches"] > 1


def test_the_largest_effective_batch_is_planned(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "planned_growing.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    plans = []
    for size in ("4,2:20,5:8", 20):
        options = ["--effective-batch", size, "--memory", "16KiB", "--out", f"plan {size}"]
        done = gradaccum("plan", "planned_growing:build", *options)
        assert done.returncode == 0, done.stderr
        assert ("20 (the largest of 4,2:20,5:8): " in done.stdout) == (size != 20)
        plans.append(json.loads((tmp_path / f"plan {size}" / "plan.json").read_text()))
    assert plans[0]["chosen"]["micro_batches"] == plans[1]["chosen"]["micro_batches"]


def test_copies_of_16_bit_parameters_are_in_a_plan(gradaccum, text, tmp_path):
    parts = {}
    for name in ("plain", "master-weights", "stochastic-rounding"):
        way = [] if name == "plain" else [f"--{name}"]
        told = ["--data", text, *SMALL, "--memory", "300MiB", "--dtype", "bfloat16", *way]
        done = gradaccum("plan", "gpt", *told, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        parts[name] = json.loads((tmp_path / name / "plan.json").read_text())["parts"]
    held = parts["plain"]["parameters"]
    kept = parts["master-weights"]
    assert kept["master weights"] == 2 * held
    assert parts["stochastic-rounding"].get("master weights", 0) == 0
    for name in ("master-weights", "stochastic-rounding"):
        assert parts[name]["optimizer state"] > 1.9 * parts["plain"]["optimizer state"]


def test_lengths_terms_and_constants_of_a_factory(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "planned_text.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    options = ["--effective-batch", 12, "--memory", "9KiB"]
    done = gradaccum("plan", "planned_text:text", *options, "--out", tmp_path / "plan")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert max(map(int, plan["caps"])) == 7


BAD = {
    "no such budget": (["planned_bad:build", "--memory", "lots"], "plan planned_bad:build: memory"),
    "more than there is": (["planned_bad:build", "--memory", "900TiB"], "at most"),
    "a loss that looks": (["planned_bad:looking"], "shapes alone"),
    "no memory for a device elsewhere": (["planned_bad:build", "--device", "cuda"], "--memory"),
    "no device": (["planned_bad:build", "--device", "banana"], "'banana'"),
    "no budget": (["planned_bad:build", "--memory", "12 bananas"], "12 bananas"),
    "less than it holds": (["planned_bad:build", "--memory", "1KiB"], "whatever its size"),
    "too little": (["planned_bad:build", "--memory", "3.2KiB"], "raise memory to"),
    "no recipe": (["gpd"], "Did you mean 'gpt'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence_and_leaves_nothing(gradaccum, name, tmp_path, monkeypatch):
    arguments, expected = BAD[name]
    (tmp_path / "planned_bad.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    done = gradaccum("plan", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["planned_bad.py"]


def test_training_pulls_as_few_levers_as_let_the_longest_sample_fit(gradaccum, text, tmp_path):
    losses = []
    for memory, expected in (("60MiB", None), ("15MiB", "chunked loss + checkpointing")):
        out = tmp_path / memory
        options = ["--steps", 3, "--seed", 1, "--memory", memory, "--out", out]
        done = gradaccum("train", "gpt", "--data", text, *SMALL, *options)
        assert done.returncode == 0, done.stderr
        told = re.search(r"^levers +(.*?) *$", done.stdout, re.MULTILINE)
        assert (told[1] if told else None) == expected
        assert f"at most {memory[:2]}.0 MiB" in done.stdout
        losses.append(json.loads((out / "result.json").read_text())["held_out_loss"]["last"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    done = gradaccum("train", "gpt", "--data", text, *SMALL, "--memory", "14MiB")
    assert done.returncode == 2
    assert "14.2 MiB with chunked loss + checkpointing. Truncate samples, or" in done.stderr


def test_free_memory_is_told_so_that_the_run_can_be_repeated(gradaccum, text, tmp_path):
    again = [tmp_path / "one" / "config.toml"]
    for out, source in (("one", ["gpt", "--data", text, *SMALL, "--steps", 2]), ("two", again)):
        done = gradaccum("train", *source, "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
    first, second = (
        (tmp_path / out / "config.toml").read_text().splitlines() for out in ("one", "two")
    )
    assert first == second
    assert any(re.fullmatch(r'memory = "\d+MiB"', line) for line in first)
