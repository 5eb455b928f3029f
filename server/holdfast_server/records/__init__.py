"""What is known of a job: position, status, checkpoints, lineages, restore orders, desired state, audit log.

Each module owns the rows of one kind and the rules for changing them. May import `samples`, `db`, `models` and
`core`.
"""
