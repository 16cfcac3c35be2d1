"""What the process that forks the others (`tests/support/forked.py`) does once for all of them,
beside its imports: the thousand patterns that transformers compiles when it writes its first model,
a quarter of a second for each process that trains."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
