"""Implementations of `trinity.trainer.engine.TrainEngine`, one folder a framework."""
