"""Many small trainings as one program: the command, and a study of what it saves."""
