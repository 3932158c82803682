"""Fine-tune language models that fit none of your machines, on the unlike machines that you have."""

__version__ = "0.1.0"
