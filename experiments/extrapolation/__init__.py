"""Which positional scheme keeps working beyond its training length? One budget, the same text and order for all."""
