"""trinity: reinforcement fine-tuning of language models. Import from the packages below."""

__version__ = "0.1.0"
