"""The commands of `lenity`, one group a module; each has `register(app)` that adds its own to the root."""
