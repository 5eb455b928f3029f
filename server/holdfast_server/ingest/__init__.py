"""From a batch of reports to one transaction.

Entry point: `transaction`; `admission` limits what is accepted at a time, `batches` decodes it, `position` stores
samples and advances the job, `events` says what each event changes.
May import `records` and what that imports.
"""
