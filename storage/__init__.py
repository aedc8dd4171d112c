"""Everything that outlives a process: wire records, streams, leases, tables. Imports nothing of ours."""
