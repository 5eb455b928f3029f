"""The part of a store's rate that a job gets, where operators limit it: reports of what is written, and the limit.

Entry point: `traffic.StoreTraffic`, which `holdfast.save.store_shares` loads once a server that knows limits of
stores has answered.
"""
