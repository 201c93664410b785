"""The command line's commands, one module each: parse, call, print. `marfl.cli` assembles them."""
