"""The bundled model pair, its tasks, and how both were made and measured."""
