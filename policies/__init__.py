"""What leniency means (rules) and what operators allow (the policy document). Imports nothing of ours."""
