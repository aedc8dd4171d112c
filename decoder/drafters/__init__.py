"""Draft-token sources behind one interface."""
