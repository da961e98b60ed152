"""How fast does text become shards, and shards batches?"""
