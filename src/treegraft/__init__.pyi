"""The public names, and the modules from which `treegraft` loads them on first use."""

from treegraft.algo.arpo import branch_probability as branch_probability
from treegraft.algo.arpo import entropy_change as entropy_change
from treegraft.algo.arpo import shared_advantages as shared_advantages
from treegraft.algo.groups import group_advantages as group_advantages
from treegraft.algo.rapo import combined_advantages as combined_advantages
from treegraft.algo.rapo import retrieval_reward as retrieval_reward
from treegraft.algo.rapo import shaping_factor as shaping_factor
from treegraft.core.errors import DataError as DataError
from treegraft.core.errors import SettingError as SettingError
from treegraft.core.errors import ToolError as ToolError
from treegraft.core.errors import ToolUnavailable as ToolUnavailable
from treegraft.core.errors import TreegraftError as TreegraftError
from treegraft.core.types import Origin as Origin
from treegraft.core.types import Status as Status
from treegraft.core.types import Step as Step
from treegraft.core.types import StepContent as StepContent
from treegraft.core.types import Task as Task
from treegraft.core.types import Trace as Trace
from treegraft.core.types import Trajectory as Trajectory
from treegraft.core.types import Tree as Tree
from treegraft.evals.agent import answer_question as answer_question
from treegraft.evals.evaluate import evaluate_checkpoint as evaluate_checkpoint
from treegraft.policy.engine.scripted import ScriptedEngine as ScriptedEngine
from treegraft.policy.learn.pack import TreeBatch as TreeBatch
from treegraft.policy.learn.pack import pack_trees as pack_trees
from treegraft.policy.learn.scores import token_scores as token_scores
from treegraft.runs.record import read_trees as read_trees
from treegraft.runs.result import RunResult as RunResult
from treegraft.runs.trust import trust as trust
from treegraft.session import Session as Session
from treegraft.settings.config import Config as Config
from treegraft.settings.load import load_config as load_config
from treegraft.tasks.scoring import exact_match as exact_match
from treegraft.tasks.scoring import f1 as f1
from treegraft.tasks.scoring import math_equal as math_equal
from treegraft.traces.buffer import TraceBuffer as TraceBuffer
from treegraft.train import sft as sft
from treegraft.train import train as train

__version__: str
