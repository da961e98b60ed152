"""Benchmarks of checkpoints: long context, short context, state tracking. `python -m bampath.evaluation` runs suites.

`passkey`, `perplexity`, `ruler`, `babilong`, `phonebook`, `longbench2`, `longbench_e`, `short` and `state` are
libraries and commands. `reader` (logits and losses), `answers` (generation) and `likelihood` are what they need of a
model, `questions` and `materials` what prompts are made of, `session` what a run of several shares, `results` and
`report` (with `bampath.intervals`) what numbers need to be believed, `harness` the model of lm-evaluation-harness,
`speed` how fast all this is. Import from the modules: a package that imported its own commands would load them twice
when they run.
"""
