"""The Tinker service as an engine; its trainer is `trinity.trainer.backends.tinker`."""

from trinity.engine.tinker.settings import TinkerEngineSettings, TinkerServiceSettings

__all__ = ["TinkerEngineSettings", "TinkerServiceSettings"]
