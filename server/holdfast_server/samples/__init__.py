"""Per-iteration samples: batches as agents send them, columnar chunks, roll-ups and time series.

Entry points: `batches` for decoding, `reading` for queries, `compaction` for the background job. May import
`core`, `models` and `db`.
"""
