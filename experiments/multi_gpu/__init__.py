"""What do the GPUs of one host make of a train step, and what limits them?"""
