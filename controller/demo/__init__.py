"""`lenity demo`: the whole loop in real processes on the bundled pair, in minutes."""
