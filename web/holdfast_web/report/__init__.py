"""The report on a job or on the fleet over some hours.

It has a route, views and one template.
"""
