"""The bundled pair, its tasks and its traffic."""
