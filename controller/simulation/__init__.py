"""The closed loop under simulated time: the real controller against a simulated worker. See `docs/simulate.md`."""
