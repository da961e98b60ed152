"""Measuring models far beyond their training length: passkey retrieval and perplexity by position.

`passkey` and `perplexity` are both libraries and commands; `reader` is what they need of a model, `intervals` and
`results` what their numbers need to be believed. Import from the modules: a package that imported its own commands
would load them twice when they run.
"""
