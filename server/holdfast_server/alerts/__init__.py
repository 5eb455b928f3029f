"""Alert rules on the state of jobs, the alerts that they raise, and the messages about them.

conditions: what a rule can check, as pure functions. facts: the state of jobs, in a few queries. rules: those of a
    project.
incidents: the life cycle of alerts. evaluation: the background job. channels, deliveries: how alerts are sent;
    channel_kinds: the services that they are sent to.
egress: HTTP requests that cannot reach the server's own network.
"""
