"""Does training with the fused kernels give the losses of the plain path?"""
