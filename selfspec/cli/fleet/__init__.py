"""`--ray` and `--num-workers`: the options of commands whose work can be spread over workers."""
