"""Many runs: engines, progress, records."""
