"""The YAML file of a run: its sections, how it is read, checked and filled in. Loads no torch."""

from trinity.common.config.advice import find_advice
from trinity.common.config.algorithm import AlgorithmConfig, OptimizerConfig
from trinity.common.config.base import ConfigModel
from trinity.common.config.buffer import (
    BufferConfig,
    DataSelectorConfig,
    ExperienceBufferConfig,
    ExplorerInputConfig,
    FormatConfig,
    GenerationConfig,
    ReplayBufferConfig,
    TasksetConfig,
    TrainerInputConfig,
)
from trinity.common.config.check import find_problems
from trinity.common.config.cluster import ClusterConfig
from trinity.common.config.data_processor import (
    DataProcessorConfig,
    ExperiencePipelineConfig,
    OperatorConfig,
    TaskPipelineConfig,
)
from trinity.common.config.derive import (
    Derivation,
    derive,
    needs_critic,
    needs_reference,
)
from trinity.common.config.explorer import (
    DynamicTimeoutConfig,
    ExplorerConfig,
    OverRolloutConfig,
)
from trinity.common.config.fill import Derived, is_set
from trinity.common.config.gpus import GPUSplit, gpu_problems, split_gpus
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.loader import load_config, read_config
from trinity.common.config.log import LogConfig
from trinity.common.config.model import (
    ExternalModelConfig,
    LoRAConfig,
    ModelConfig,
    TinkerConfig,
)
from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.names import known_names
from trinity.common.config.root import Config, StageConfig
from trinity.common.config.service import DataJuicerServiceConfig, ServiceConfig
from trinity.common.config.stages import Stage, iterate_stages
from trinity.common.config.synchronizer import SynchronizerConfig
from trinity.common.config.trainer import MegatronConfig, TrainerConfig
from trinity.common.config.training import (
    BatchLimit,
    PartSettings,
    TrainingSettings,
    training_settings,
)

__all__ = [
    "AlgorithmConfig",
    "BatchLimit",
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "ConfigModel",
    "DataJuicerServiceConfig",
    "DataProcessorConfig",
    "DataSelectorConfig",
    "Derivation",
    "Derived",
    "DynamicTimeoutConfig",
    "ExperienceBufferConfig",
    "ExperiencePipelineConfig",
    "ExplorerConfig",
    "ExplorerInputConfig",
    "ExternalModelConfig",
    "FormatConfig",
    "GPUSplit",
    "GenerationConfig",
    "InferenceModelConfig",
    "LoRAConfig",
    "LogConfig",
    "MegatronConfig",
    "ModelConfig",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "OverRolloutConfig",
    "PartSettings",
    "ReplayBufferConfig",
    "ServiceConfig",
    "Stage",
    "StageConfig",
    "SynchronizerConfig",
    "TaskPipelineConfig",
    "TasksetConfig",
    "TinkerConfig",
    "TrainerConfig",
    "TrainerInputConfig",
    "TrainingSettings",
    "derive",
    "find_advice",
    "find_problems",
    "gpu_problems",
    "is_set",
    "iterate_stages",
    "known_names",
    "load_config",
    "needs_critic",
    "needs_reference",
    "read_config",
    "split_gpus",
    "training_settings",
]
