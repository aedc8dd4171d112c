"""The sidecar: estimates, governs, solves and leases. Never imports torch."""
