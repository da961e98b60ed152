"""Which schemes reach beyond their training length, at a size that one GPU trains in minutes?"""
