"""RULER (Hsieh et al., arXiv 2404.06654): thirteen tasks at any length, with any tokenizer, from local material.

Written anew to the templates and rules of NVIDIA/RULER (Apache-2.0); docs/evaluation.md names what differs. `tasks`
lists them, `haystack`, `tracking`, `counting` and `documents` make their prompts, `__main__` is the command.
"""
