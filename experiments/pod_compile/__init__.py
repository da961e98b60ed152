"""Do the train steps of the named models fit TPU pods? Compiled without one."""
