"""Alembic migrations of the history; `storage.history.History.upgrade` runs them."""
