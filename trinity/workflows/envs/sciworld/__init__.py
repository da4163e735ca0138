"""ScienceWorld: school experiments in text."""
