"""The page of a job: live figures, timeline, controls, restore, plan, goodput, stalls and ranks.

Entry points: the routers of `routes` (page and dialogs), `controls` (forms that change settings),
`annotation_dialogs`, `panels` (goodput, stalls, ranks) and `attempts` (their list and pages); `views` has the
views. May import `fleet`, `alerts` and `shared`.
"""
