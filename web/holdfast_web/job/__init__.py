"""The page of a job: live figures, timeline, controls, restore, plan, goodput, stalls and ranks.

Entry points: the routers of `routes` (page and dialogs), `controls` (forms that change settings),
`annotation_dialogs` and `panels` (goodput, stalls, ranks); `context` has the views. May import `fleet`, `alerts`
and `shared`.
"""
