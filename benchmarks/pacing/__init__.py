"""What pacing promises, measured: overheads beside the budget, reactions, plans, the arithmetic of failures."""
