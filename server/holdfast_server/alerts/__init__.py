"""Alerts: rules on the state of jobs, the incidents that they find, and who is told of them.

kinds: what can be looked at, pure. facts: what is known of jobs, in a few queries. rules: what a project wants.
incidents: from the first sign to the end. evaluation: the chore. channels, deliveries: who is told, and whether it
arrived. egress: how a request leaves the house.
"""
