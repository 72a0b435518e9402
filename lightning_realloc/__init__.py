"""Parameter reallocation for training several models at once in PyTorch Lightning.

Importing this package registers ``strategy="realloc"``. It imports neither torch nor Lightning: the public names below
are imported from their modules on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names as _lazy_names
from lightning_realloc.parent_watch import watch_announced_parent as _watch_announced_parent
from lightning_realloc.version import __version__ as __version__
from lightning_realloc_autoload import install as _register_strategies

if TYPE_CHECKING:
    from lightning_realloc.algorithms.base.calls import compute as compute
    from lightning_realloc.algorithms.base.calls import generate as generate
    from lightning_realloc.algorithms.base.calls import infer as infer
    from lightning_realloc.algorithms.base.calls import train as train
    from lightning_realloc.algorithms.base.generation_options import GenerationOptions as GenerationOptions
    from lightning_realloc.algorithms.base.module import MultiModelModule as MultiModelModule
    from lightning_realloc.algorithms.base.optimizers import RoleOptimizer as RoleOptimizer
    from lightning_realloc.algorithms.base.role import Role as Role
    from lightning_realloc.algorithms.best_of_n import BestOfN as BestOfN
    from lightning_realloc.algorithms.distillation import OnPolicyDistillation as OnPolicyDistillation
    from lightning_realloc.algorithms.dpo import DPO as DPO
    from lightning_realloc.algorithms.evaluation.evaluation_set import EvaluationSet as EvaluationSet
    from lightning_realloc.algorithms.evaluation.named_evaluation import Evaluation as Evaluation
    from lightning_realloc.algorithms.grpo import GRPO as GRPO
    from lightning_realloc.algorithms.kto import KTO as KTO
    from lightning_realloc.algorithms.losses.correction import Correction as Correction
    from lightning_realloc.algorithms.losses.entropy import AdaptiveEntropy as AdaptiveEntropy
    from lightning_realloc.algorithms.losses.entropy import ClipCov as ClipCov
    from lightning_realloc.algorithms.losses.entropy import KLCov as KLCov
    from lightning_realloc.algorithms.losses.entropy import TopShare as TopShare
    from lightning_realloc.algorithms.losses.kl import KL as KL
    from lightning_realloc.algorithms.losses.policy_losses import Cispo as Cispo
    from lightning_realloc.algorithms.losses.policy_losses import Clip as Clip
    from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss as PolicyLoss
    from lightning_realloc.algorithms.losses.policy_losses import Sapo as Sapo
    from lightning_realloc.algorithms.losses.policy_losses import Vespo as Vespo
    from lightning_realloc.algorithms.online_dpo import OnlineDPO as OnlineDPO
    from lightning_realloc.algorithms.orpo import ORPO as ORPO
    from lightning_realloc.algorithms.ppo import PPO as PPO
    from lightning_realloc.algorithms.process_reward import ProcessReward as ProcessReward
    from lightning_realloc.algorithms.reinforce import ReinforcePlusPlus as ReinforcePlusPlus
    from lightning_realloc.algorithms.remax import ReMax as ReMax
    from lightning_realloc.algorithms.reward_model import RewardModel as RewardModel
    from lightning_realloc.algorithms.rloo import RLOO as RLOO
    from lightning_realloc.algorithms.rollout.accuracy import Accuracy as Accuracy
    from lightning_realloc.algorithms.rollout.conversations.partner_roles import ActorAverage as ActorAverage
    from lightning_realloc.algorithms.rollout.dynamic_sampling import DynamicSampling as DynamicSampling
    from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient as PolicyGradient
    from lightning_realloc.algorithms.rollout.reward_sources import StopProperly as StopProperly
    from lightning_realloc.algorithms.rollout.token_advantages import GAE as GAE
    from lightning_realloc.algorithms.sft import SFT as SFT
    from lightning_realloc.batch.training import TrainOptions as TrainOptions
    from lightning_realloc.callbacks import EMA as EMA
    from lightning_realloc.callbacks import AutoTuner as AutoTuner
    from lightning_realloc.callbacks import MemoryMonitor as MemoryMonitor
    from lightning_realloc.callbacks import MetricAlarm as MetricAlarm
    from lightning_realloc.callbacks import ParameterReallocation as ParameterReallocation
    from lightning_realloc.callbacks import PhaseCallback as PhaseCallback
    from lightning_realloc.callbacks import PredictionWriter as PredictionWriter
    from lightning_realloc.callbacks import RolloutTable as RolloutTable
    from lightning_realloc.callbacks import SaveHuggingFace as SaveHuggingFace
    from lightning_realloc.callbacks import Timeline as Timeline
    from lightning_realloc.callbacks import TrackioLogger as TrackioLogger
    from lightning_realloc.data.demonstrations import SFTDataModule as SFTDataModule
    from lightning_realloc.data.feedback import BinaryFeedbackDataModule as BinaryFeedbackDataModule
    from lightning_realloc.data.preferences import PreferenceDataModule as PreferenceDataModule
    from lightning_realloc.data.prompts import PromptDataModule as PromptDataModule
    from lightning_realloc.data.sampling.curriculum import Curriculum as Curriculum
    from lightning_realloc.data.sources import DatasetSource as DatasetSource
    from lightning_realloc.data.steps import StepDataModule as StepDataModule
    from lightning_realloc.dataflow.dataflow import Dataflow as Dataflow
    from lightning_realloc.dataflow.dataflow import ModelFunctionCall as ModelFunctionCall
    from lightning_realloc.dataflow.execution_plan import CallPlan as CallPlan
    from lightning_realloc.dataflow.execution_plan import ExecutionPlan as ExecutionPlan
    from lightning_realloc.environments.message_environment import MessageEnvironment as MessageEnvironment
    from lightning_realloc.environments.message_environment import StepResult as StepResult
    from lightning_realloc.environments.tool_environment import ToolEnvironment as ToolEnvironment
    from lightning_realloc.environments.tools.tool import Tool as Tool
    from lightning_realloc.errors import CheckpointError as CheckpointError
    from lightning_realloc.errors import ConfigError as ConfigError
    from lightning_realloc.errors import DataError as DataError
    from lightning_realloc.errors import GenerationError as GenerationError
    from lightning_realloc.errors import LayoutError as LayoutError
    from lightning_realloc.errors import PlanError as PlanError
    from lightning_realloc.errors import ReallocError as ReallocError
    from lightning_realloc.errors import RewardError as RewardError
    from lightning_realloc.generation import Completion as Completion
    from lightning_realloc.generation import Conversation as Conversation
    from lightning_realloc.generation import GenerationEngine as GenerationEngine
    from lightning_realloc.generation import RolloutBudget as RolloutBudget
    from lightning_realloc.generation import SamplingParams as SamplingParams
    from lightning_realloc.generation import Speculation as Speculation
    from lightning_realloc.generation import Turn as Turn
    from lightning_realloc.generation import VLLMOptions as VLLMOptions
    from lightning_realloc.layout import ClusterSpec as ClusterSpec
    from lightning_realloc.layout import Layout as Layout
    from lightning_realloc.layout import ModelLayout as ModelLayout
    from lightning_realloc.layout import ModelSpec as ModelSpec
    from lightning_realloc.layout import ParallelDims as ParallelDims
    from lightning_realloc.realloc import ReallocationPlan as ReallocationPlan
    from lightning_realloc.realloc import plan_reallocation as plan_reallocation
    from lightning_realloc.rewards.verifiers import exact_match as exact_match
    from lightning_realloc.strategies import ReallocStrategy as ReallocStrategy
    from lightning_realloc.strategies.lightning.ray_options import RayOptions as RayOptions
    from lightning_realloc.tuning.search.plan_search import search_plan as search_plan

__getattr__, __dir__ = _lazy_names(__name__)

_watch_announced_parent()
_register_strategies()
