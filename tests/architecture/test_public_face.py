"""What is public is frozen here: a new name or flag is a new promise, made in the same commit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import gradaccum
from gradaccum.cli.app import app

ROOT = Path(__file__).parents[2]

NAMES = {
    "Accumulator",
    "CutInvarianceWarning",
    "EMA",
    "EffectiveBatchSampler",
    "EffectiveBatches",
    "Evaluation",
    "GradaccumError",
    "Loss",
    "Outcome",
    "SizeChangedWarning",
    "StepReport",
    "accumulator",
    "effective_batches",
    "losses",
    "partition",
    "track",
}

FLAGS = {
    "plan": {
        "--data",
        "--device",
        "--dtype",
        "--effective-batch",
        "--image-size",
        "--master-weights",
        "--max-length",
        "--memory",
        "--model",
        "--out",
        "--seed",
        "--spectral-norm",
        "--stochastic-rounding",
        "--sum-dtype",
        "--text-field",
        "--tokenizer",
    },
    "train": {
        "--data",
        "--device",
        "--dtype",
        "--effective-batch",
        "--epochs",
        "--lr",
        "--image-size",
        "--lr-rule",
        "--master-weights",
        "--max-grad-norm",
        "--max-length",
        "--memory",
        "--micro-batch-size",
        "--micro-batch-tokens",
        "--model",
        "--out",
        "--scheduler",
        "--seed",
        "--spectral-norm",
        "--steps",
        "--stochastic-rounding",
        "--sum-dtype",
        "--text-field",
        "--tokenizer",
        "--warmup",
        "--weight-decay",
    },
}


def test_public_names_are_frozen():
    submodules = {path.stem for path in (ROOT / "src" / "gradaccum").iterdir()}
    public = {name for name in vars(gradaccum) if not name.startswith("_")}
    assert public - (submodules - NAMES) == NAMES


def test_flags_are_frozen():
    command = get_command(app())
    flags = {
        name: {flag for parameter in one.params for flag in parameter.opts if flag[0] == "-"}
        for name, one in command.commands.items()
    }
    assert flags == FLAGS


def test_every_flag_is_explained():
    for command in get_command(app()).commands.values():
        for parameter in command.params:
            if isinstance(parameter, typer.core.TyperOption):
                assert parameter.help, f"{command.name} {parameter.opts}"


PROBE = """
import json, logging, os, random, signal, sys, threading, warnings
import numpy, torch

def state():
    return {
        "environment": dict(os.environ),
        "handlers": len(logging.root.handlers),
        "level": logging.root.level,
        "filters": len(warnings.filters),
        "threads": threading.active_count(),
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "seed": torch.initial_seed(),
        "python": hash(random.getstate()),
        "numpy": numpy.random.get_state()[1].tolist(),
        "threads of torch": torch.get_num_threads(),
        "hook": str(sys.excepthook),
        "path": sys.path,
    }

before, modules = state(), set(sys.modules)
import gradaccum
print(json.dumps({"same": before == state(), "new": sorted(set(sys.modules) - modules)}))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_importing_changes_nothing(imported):
    assert imported["same"]


@pytest.mark.parametrize(
    "name",
    [
        "PIL",
        "accelerate",
        "datasets",
        "lightning",
        "matplotlib",
        "pydantic",
        "rich",
        "skimage",
        "tokenizers",
        "transformers",
        "typer",
    ],
)
def test_importing_brings_no_extra_and_no_face(imported, name):
    assert not [module for module in imported["new"] if module.split(".")[0] == name]


def test_the_type_marker_is_shipped():
    assert (Path(gradaccum.__file__).parent / "py.typed").exists()
