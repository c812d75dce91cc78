"""``gradaccum train gan`` and ``plan gan``: two objectives side by side, through the one loop."""

import json
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image

from gradaccum.recipes import gan
from gradaccum.recipes.images.photographs import photographs
from gradaccum.recipes.images.sampling import load_pair

BOTH = ["discriminator", "generator"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in (("_WIDTH", 8), ("_NOISE", 6), ("_SCORED", 64), ("_DECAY", 0.9)):
        monkeypatch.setattr(gan, name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small pictures of ramps."""
    path = tmp_path_factory.mktemp("pictures")
    ramp = np.linspace(0, 255, 40 * 50).reshape(40, 50)
    for k, channels in enumerate(([1, 0.5, 0], [0, 0.5, 1])):
        image = (ramp[..., None] * np.asarray(channels)).astype(np.uint8)
        Image.fromarray(image).save(path / f"{k}.png")
    return path


@pytest.fixture
def train(gradaccum, folder, tmp_path):
    def call(out, *more, steps=4, recipe="gan"):
        small = ["--image-size", 32, "--effective-batch", 8, "--steps", steps]
        source = ["--data", folder, *small] if recipe == "gan" else []
        return gradaccum("train", recipe, *source, *more, "--out", tmp_path / out)

    return call


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_time(out):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(out)]


def size_of(path):
    with Image.open(path) as image:
        return image.size


def test_a_run_leaves_pictures_metrics_result_and_models(train, tmp_path):
    done = train("out", "--micro-batch-size", 3)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "model",
        "result.json",
        "sample.png",
        "samples",
    }
    pictures = sorted(path.name for path in (out / "samples").iterdir())
    assert pictures == [f"step-{k:06}.png" for k in range(5)]
    for path in (out / "sample.png", *(out / "samples").iterdir()):
        assert size_of(path) == (8 * 32, 8 * 32)
    assert (out / "sample.png").read_bytes() == (out / "samples" / pictures[-1]).read_bytes()
    assert (out / "sample.png").read_bytes() != (out / "samples" / pictures[0]).read_bytes()

    reports = lines(out)
    assert [report["objective"] for report in reports] == BOTH * 4
    assert [report["optimizer_step"] for report in reports] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(report["micro_batches"] == 3 and report["weight"] == 8 for report in reports)
    rates = [report["lr"] for report in reports]
    assert rates == pytest.approx([2e-4, 1e-3] * 4), "constant from the first step on"

    result = json.loads((out / "result.json").read_text())
    assert list(result["counters"]) == BOTH
    for counters in result["counters"].values():
        assert (counters["optimizer_steps"], counters["micro_steps"]) == (4, 12)
        assert counters["samples"] == 32
    assert set(result["score"]) == {"first", "last"}
    assert f"Fréchet distance {result['score']['last']:.4f}" in done.stdout
    assert f"(of real patches {result['baseline']['of real patches']:.4f})" in done.stdout
    assert "discriminator " in done.stdout
    assert "BatchNorm" not in done.stdout, "it sees the effective batch"

    images = load_pair(out / "model").generator(torch.randn(2, 6))
    assert images.shape == (2, 3, 32, 32)


def test_batch_norm_that_sees_one_micro_batch_is_told(train):
    done = train("out", "--memory", "4MiB", "--effective-batch", 64, steps=1)
    assert done.returncode == 0, done.stderr
    assert "generator: BatchNorm sees each of" in done.stdout
    assert "not quite the update of the full batch" in done.stdout


def test_nothing_is_said_of_batch_norm_where_nothing_is_cut(train):
    done = train("out", steps=1)
    assert done.returncode == 0, done.stderr
    assert "BatchNorm" not in done.stdout
    assert "Warning" not in done.stderr


def test_its_config_repeats_a_run_bit_for_bit(train, tmp_path):
    for more in ([], ["--spectral-norm", "--weight-decay", 0.1]):
        first, again = f"first{len(more)}", f"again{len(more)}"
        assert train(first, "--seed", 3, *more, steps=2).returncode == 0
        done = train(again, recipe=tmp_path / first / "config.toml")
        assert done.returncode == 0, done.stderr
        assert without_time(tmp_path / again) == without_time(tmp_path / first)
        weights = [tmp_path / out / "model" / "generator.safetensors" for out in (first, again)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    plain, other = (lines(tmp_path / out) for out in ("first0", "first3"))
    assert plain[0]["loss"] != other[0]["loss"]
    config = tomllib.loads((tmp_path / "first3" / "config.toml").read_text())
    assert config["spectral_norm"] is True
    assert "max_grad_norm" not in config, "not bounded, and not by the default of text either"


def test_the_score_falls_as_it_learns(train, tmp_path):
    done = train("out", "--lr", 1e-3, "--effective-batch", 16, steps=80)
    assert done.returncode == 0, done.stderr
    score = json.loads((tmp_path / "out" / "result.json").read_text())["score"]
    assert score["last"] < 0.8 * score["first"]


def test_the_default_is_photographs_and_64_pixels(gradaccum, tmp_path):
    done = gradaccum(
        "train", "gan", "--steps", 1, "--effective-batch", 2, "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert size_of(tmp_path / "out" / "sample.png") == (512, 512)
    assert min(min(image.shape[:2]) for image in photographs()) >= 256, "as large as sizes go"


def test_a_plan_for_each_objective(gradaccum, folder, tmp_path):
    small = ["--data", folder, "--image-size", 32, "--effective-batch", 64, "--memory", "3MiB"]
    done = gradaccum("plan", "gan", *small, "--out", tmp_path / "plan")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {
        "plan.json",
        "frontier-discriminator.png",
        "frontier-generator.png",
    }
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert list(plan) == ["recipe", *BOTH]
    for name in BOTH:
        assert f"gan {name} on cpu, " in done.stdout
        (other,) = set(BOTH) - {name}
        state = plan[other]["parts"]["optimizer state"]
        assert plan[name]["budget"] == 3 * 2**20 - state, "beside the other's state"
        assert plan[name]["chosen"]["peak"] <= plan[name]["budget"]
        assert plan[name]["chosen"]["micro_batches"] > 1


def test_training_keeps_within_what_is_planned(gradaccum, train, folder, tmp_path):
    small = ["--data", folder, "--image-size", 32, "--effective-batch", 64]
    for command, more in (("plan", []), ("train", ["--steps", 1])):
        out = tmp_path / command
        done = gradaccum(command, "gan", *small, "--memory", "3MiB", *more, "--out", out)
        assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    for report in lines(tmp_path / "train"):
        planned = plan[report["objective"]]["chosen"]["micro_batches"]
        assert report["micro_batches"] == pytest.approx(planned, abs=1)


BAD = {
    "a size that is none": (["--image-size", 100], "image_size = 100: expected 32, 64, 128 or 256"),
    "for text": (["--tokenizer", "gpt2"], "tokenizer: expected settings that this recipe uses"),
    "tokens": (["--micro-batch-tokens", 64], "micro_batch_tokens: expected settings that this"),
    "half precision": (["--dtype", "bfloat16"], "dtype: expected settings that this recipe uses"),
    "lengths": (["--max-length", 64], "max_length: expected settings that this recipe uses"),
    "no folder": (["--data", "nowhere"], "expected a folder of images, got no such folder"),
    "too small": (["--image-size", 64], "at least 64 x 64 pixels, got 50 x 40"),
    "less than it holds": (["--memory", "100KiB"], "whatever its size"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error_and_leaves_nothing(train, name, tmp_path):
    arguments, expected = BAD[name]
    done = train("out", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [["--image-size", 64], ["--spectral-norm"]])
def test_recipes_on_text_refuse_what_images_have(gradaccum, more):
    done = gradaccum("train", "gpt", *more)
    assert done.returncode == 2
    assert "expected settings that this recipe uses" in done.stderr


FACTORY = """
import torch
import gradaccum as ga
from gradaccum.recipes.objective import Objective
from gradaccum.recipes.recipe import Recipe

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 1)})
    def objective(name, broken=False):
        def loss(model, rows):
            if broken and model["a"].bias > 3:
                raise RuntimeError("broken")
            return ga.Loss((model[name](rows) - 9).square().sum(), len(rows))
        return Objective(name=name, loss=loss,
                         optimizer=torch.optim.SGD(model[name].parameters(), lr=0.1))
    return Recipe(
        model=model,
        objectives=[objective("a"), objective("b", broken=True)],
        train=list(torch.randn(64, 3) + 1),
        score=("distance", lambda: float("nan")),
        save=lambda folder: None,
    )
"""


def test_objectives_of_ones_own_and_one_of_them_breaks(gradaccum, tmp_path, monkeypatch):
    (tmp_path / "side.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    options = ["--effective-batch", 8, "--micro-batch-size", 3, "--lr", 0.1, "--out", "out"]
    with pytest.raises(RuntimeError, match="broken"):
        gradaccum("train", "side:build", *options, "--epochs", 20)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    steps = {name: counters["optimizer_steps"] for name, counters in result["counters"].items()}
    assert steps["a"] == steps["b"] + 1, "the one that did not break has made its step"
    assert [line["objective"] for line in lines(tmp_path / "out")] == ["a", "b"] * steps["b"] + [
        "a"
    ]
    assert result["score"] == {"first": None, "last": None}
    assert result["stopped"] is True
    assert (tmp_path / "out" / "model").exists()
