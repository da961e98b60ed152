"""Study: what becomes of a RoPE model when it is turned into a model of another positional scheme."""
