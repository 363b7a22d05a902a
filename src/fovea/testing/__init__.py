"""What tests of attention need: inputs, the float64 oracle, error budgets, random problems."""
