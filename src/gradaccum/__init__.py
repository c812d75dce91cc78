"""Train at any effective batch size on the memory you have, with the full batch's update."""

from importlib.metadata import version as _version

from gradaccum import coupled as coupled
from gradaccum import partition as partition
from gradaccum.accumulator import Accumulator as Accumulator
from gradaccum.audit import CutInvarianceWarning as CutInvarianceWarning
from gradaccum.build import accumulator as accumulator
from gradaccum.build import effective_batches as effective_batches
from gradaccum.ema import EMA as EMA
from gradaccum.errors import GradaccumError as GradaccumError
from gradaccum.loader import EffectiveBatches as EffectiveBatches
from gradaccum.loss import Loss as Loss
from gradaccum.loss import losses as losses
from gradaccum.outcome import Evaluation as Evaluation
from gradaccum.outcome import Outcome as Outcome
from gradaccum.outcome import StepReport as StepReport
from gradaccum.sampler import EffectiveBatchSampler as EffectiveBatchSampler
from gradaccum.sizes import SizeChangedWarning as SizeChangedWarning
from gradaccum.telemetry import track as track

__version__ = _version("gradaccum")
