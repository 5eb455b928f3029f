"""The page of a job: live figures, timeline, controls, restore, plan, goodput, stalls and ranks.

Entry points: the routers of `routes` (page and dialogs), `controls` (forms that change settings) and `panels`
(goodput, stalls, ranks), `attempts` (their list and pages); `context` has the views. May import `fleet`,
`alerts` and `shared`.
"""
