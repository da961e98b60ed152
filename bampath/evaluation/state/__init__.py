"""State tracking: tasks that are drawn as they are needed, and what a model gets wrong on them.

`tasks` is what all share and how a task is written (`fflm(pairs=64)`); `flipflop`, `words` and `recall` draw them;
`score` asks a reader; `command` asks a checkpoint.
"""
